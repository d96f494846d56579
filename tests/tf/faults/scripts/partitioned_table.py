"""Trains a table of twelve rows in graph mode until the row of id N holds N + 0.5, and prints the rows as lookups find
them. It uses nothing of tf-ps-run.

Environment variables: how the table is partitioned (PARTITIONER), how ids are assigned to the parts
(PARTITION_STRATEGY), and the directory of checkpoints (MODEL_DIR).
"""

import json
import os
import time

import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()

ROWS = 12
TRAINED_AT = 30
"""The step from which on the table is not changed: no later step repairs rows that a restore has permuted."""

PARTITIONERS = {
    "fixed": lambda servers: tf.fixed_size_partitioner(servers),
    # At most two parts, each with half of the table's bytes.
    "min_max": lambda servers: tf.min_max_variable_partitioner(max_partitions=servers, min_slice_size=ROWS * 4 // 2),
    "two_per_server": lambda servers: tf.fixed_size_partitioner(2 * servers),
    "always_four": lambda servers: tf.fixed_size_partitioner(4),
}


def main():
    stated = json.loads(os.environ["TF_CONFIG"])
    cluster, task = tf.train.ClusterSpec(stated["cluster"]), stated["task"]
    print(f"{task['type']} {task['index']}: pid = {os.getpid()} ", flush=True)
    server = tf.train.Server(cluster, job_name=task["type"], task_index=task["index"])
    if task["type"] == "ps":
        server.join()
    here = f"/job:{task['type']}/task:{task['index']}"
    servers = len(stated["cluster"]["ps"])
    strategy = os.environ.get("PARTITION_STRATEGY", "mod")
    with tf.device(tf.train.replica_device_setter(worker_device=here, cluster=cluster)):
        step = tf.train.get_or_create_global_step()
        table = tf.get_variable(
            "table",
            [ROWS, 1],
            initializer=tf.zeros_initializer(),
            partitioner=PARTITIONERS[os.environ["PARTITIONER"]](servers),
        )
        wanted = tf.range(ROWS, dtype=tf.float32) + 0.5
        looked_up = tf.nn.embedding_lookup(table, tf.range(ROWS), partition_strategy=strategy)[:, 0]
        wrong = tf.where(step < TRAINED_AT, looked_up - wanted, tf.zeros([ROWS]))
        loss = 0.5 * tf.reduce_sum(tf.square(tf.stop_gradient(wrong) + looked_up - tf.stop_gradient(looked_up)))
        train = tf.train.GradientDescentOptimizer(0.5).minimize(loss, global_step=step)
    parts = len(list(table))

    def show(session):
        at, rows = session.run([step, looked_up])
        rows = " ".join(f"{row:.1f}" for row in rows)
        print(f"step {at}: {parts} parts on {servers} servers: {rows}", flush=True)

    class Show(tf.train.SessionRunHook):
        def after_create_session(self, session, coord):
            show(session)

    with tf.train.MonitoredTrainingSession(
        master=server.target,
        is_chief=task["type"] == "chief",
        checkpoint_dir=os.environ["MODEL_DIR"],
        hooks=[Show()],
        save_checkpoint_secs=None,
        save_checkpoint_steps=20,
        log_step_count_steps=None,
    ) as session:
        for count in range(1, 10**9):
            session.run(train)
            time.sleep(0.02)
            if count % 20 == 0:
                session.run_step_fn(lambda step_context: show(step_context.session))


main()
