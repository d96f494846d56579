"""Trains a table in graph mode without end, as scripts for TensorFlow 1 do, and reports each session and step.

It uses nothing of tf-ps-run, unless DATA_SHARDS selects its data. When the file STOP_FILE appears, training ends and
MonitoredTrainingSession saves the model: that is how a job without a launcher is stopped.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from reporting import report

tf.disable_v2_behavior()

ROWS, WIDTH, BATCH = 6000, 16, 32
PACE = 0.02
"""Seconds that a step sleeps, so that the processes do not compete for the processors."""

CHECKPOINT_STEPS = 50
"""Steps between checkpoints. The steps after the last one are lost with a server."""

ENDLESS = 10**9
SHARD = 3200


class Reporter(tf.train.SessionRunHook):
    """Reports each session, also those that MonitoredTrainingSession makes by itself after an error, and stops."""

    def __init__(self, role: str, rank: int) -> None:
        self.role, self.rank = role, rank
        self.stop_file = os.environ.get("STOP_FILE", "")

    def after_create_session(self, session: Any, coord: Any) -> None:
        report(f"{self.role}-session", rank=self.rank)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if self.stop_file and os.path.exists(self.stop_file):
            run_context.request_stop()


def batches(seed: int) -> Iterator[np.ndarray]:
    """The rows of each batch."""
    if os.environ.get("DATA_SHARDS"):
        from tf_ps_runner.hooks import DataShards

        for begin, end in DataShards("train", ENDLESS, SHARD).batches(BATCH):
            yield np.arange(begin, end) % ROWS
    rng = np.random.default_rng(seed)
    for _ in itertools.count():
        yield rng.integers(0, ROWS, BATCH)


def main() -> None:
    config = json.loads(os.environ["TF_CONFIG"])
    cluster = tf.train.ClusterSpec(config["cluster"])
    role, rank = config["task"]["type"], config["task"]["index"]
    report(f"{role}-begun", rank=rank)
    server = tf.train.Server(cluster, job_name=role, task_index=rank)
    if role == "ps":
        server.join()
    setter = tf.train.replica_device_setter(worker_device=f"/job:{role}/task:{rank}", cluster=cluster)
    with tf.device(setter):
        step = tf.train.get_or_create_global_step()
        parts = tf.fixed_size_partitioner(len(config["cluster"]["ps"]))
        table = tf.get_variable("table", [ROWS, WIDTH], initializer=tf.random_normal_initializer(), partitioner=parts)
        rows = tf.placeholder(tf.int32, [None])
        loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(table, rows, partition_strategy="div") - 1.0))
        train = tf.train.AdagradOptimizer(0.1).minimize(loss, global_step=step)
        with tf.control_dependencies([train]):
            done = step.read_value()
    with tf.train.MonitoredTrainingSession(
        master=server.target,
        is_chief=role == "chief",
        checkpoint_dir=os.environ["MODEL_DIR"],
        hooks=[Reporter(role, rank)],
        save_checkpoint_secs=None,
        save_checkpoint_steps=CHECKPOINT_STEPS,
    ) as session:
        for chosen in batches(rank):
            if session.should_stop():
                break
            report(f"{role}-step", rank=rank, attempt=int(session.run(done, {rows: chosen})))
            time.sleep(PACE)


main()
