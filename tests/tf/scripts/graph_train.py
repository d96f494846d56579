"""Trains a small table in graph mode, as scripts for TensorFlow 1 do. It uses nothing of tf-ps-run.

Environment variables: the directory of checkpoints (MODEL_DIR), the last step (LAST_STEP), the duration of a step
(STEP_SECONDS), and the checkpoint that the model must equal to the last bit before its first step (REFERENCE).
"""

import json
import os
import time

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
tf.logging.set_verbosity(tf.logging.INFO)

ROWS = 60
MODEL_DIR = os.environ["MODEL_DIR"]
STEP_SECONDS = float(os.environ.get("STEP_SECONDS", "0.02"))


class Comparison(tf.train.SessionRunHook):
    """Compares all variables and their slots with those of a checkpoint."""

    def after_create_session(self, session, coord):
        reference = tf.train.load_checkpoint(os.environ["REFERENCE"])
        parts = {}
        for variable in sorted(tf.global_variables(), key=lambda variable: variable.name):
            name = variable._save_slice_info.full_name if variable._save_slice_info else variable.op.name
            parts.setdefault(name, []).append(session.run(variable))
        other = [
            name
            for name in parts
            if not np.array_equal(
                np.concatenate([np.atleast_1d(p) for p in parts[name]]), np.atleast_1d(reference.get_tensor(name))
            )
        ]
        print(f"compared {len(parts)} variables, different: {sorted(other)}", flush=True)


def main():
    stated = json.loads(os.environ["TF_CONFIG"])
    cluster, task = tf.train.ClusterSpec(stated["cluster"]), stated["task"]
    server = tf.train.Server(cluster, job_name=task["type"], task_index=task["index"])
    if task["type"] == "ps":
        server.join()
    here = f"/job:{task['type']}/task:{task['index']}"
    servers = len(stated["cluster"]["ps"])
    with tf.device(tf.train.replica_device_setter(worker_device=here, cluster=cluster)):
        step = tf.train.get_or_create_global_step()
        table = tf.get_variable(
            "table",
            [ROWS, 4],
            initializer=tf.random_normal_initializer(),
            partitioner=tf.fixed_size_partitioner(servers),
        )
        rows = tf.placeholder(tf.int32, [None])
        looked_up = tf.nn.embedding_lookup(table, rows, partition_strategy="div")
        loss = tf.reduce_mean(tf.square(looked_up - 1.0))
        train = tf.train.AdagradOptimizer(0.1).minimize(loss, global_step=step)
    hooks = [tf.train.StopAtStepHook(last_step=int(os.environ.get("LAST_STEP", "100000")))]
    if os.environ.get("REFERENCE") and task["type"] == "chief":
        hooks.append(Comparison())
    rng = np.random.default_rng(task["index"])
    with tf.train.MonitoredTrainingSession(
        master=server.target,
        is_chief=task["type"] == "chief",
        checkpoint_dir=MODEL_DIR,
        hooks=hooks,
        save_checkpoint_secs=None,
        save_checkpoint_steps=int(os.environ.get("SAVE_STEPS", "50")),
    ) as session:
        while not session.should_stop():
            at, _ = session.run([step, train], {rows: rng.integers(0, ROWS, 8)})
            time.sleep(STEP_SECONDS)
    print(f"finished at {at}", flush=True)


main()
