"""Trains a table with ParameterServerStrategy without end. The chief, which alone executes the steps, reports each one.

It uses nothing of tf-ps-run. When the file STOP_FILE appears, the chief saves the model and ends.
"""

from __future__ import annotations

import os
import time

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import tensorflow as tf
from reporting import report

ROWS, WIDTH, BATCH = 6000, 16, 32
PACE = 0.02
CHECKPOINT_STEPS = 50
"""As in `tf_graph.py`."""


def main() -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    cluster, role, rank = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    report(f"{role}-begun", rank=rank)
    if role in ("worker", "ps"):
        tf.distribute.Server(cluster, job_name=role, task_index=rank, protocol="grpc").join()
    parts = tf.distribute.experimental.partitioners.FixedShardsPartitioner(len(cluster.job_tasks("ps")))
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=parts)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        table = tf.Variable(lambda: tf.random.normal([ROWS, WIDTH]), name="table", shape=[ROWS, WIDTH])
        optimizer = tf.keras.optimizers.Adagrad(0.1)
        variables = list(getattr(table, "variables", [table]))
        optimizer.build(variables)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, table=table)
    manager = tf.train.CheckpointManager(checkpoint, os.environ["MODEL_DIR"], max_to_keep=3)
    checkpoint.restore(manager.latest_checkpoint)

    @tf.function
    def train() -> tf.Tensor:
        def replica() -> tf.Tensor:
            rows = tf.random.uniform([BATCH], 0, ROWS, tf.int64)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(table, rows) - 1.0))
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        return strategy.run(replica)

    stop_file = os.environ.get("STOP_FILE", "")
    step = int(optimizer.iterations)
    report(f"{role}-session", rank=rank, attempt=step)
    while not (stop_file and os.path.exists(stop_file)):
        coordinator.schedule(train)
        coordinator.join()
        step += 1
        report(f"{role}-step", rank=rank, attempt=step)
        if step % CHECKPOINT_STEPS == 0:
            manager.save()
        time.sleep(PACE)
    manager.save()


main()
