"""Reads data shards through tf.data, eagerly and in a graph, and prints the reports to the queue in between."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tf_ps_runner.hooks import DataShards

ROWS = np.arange(40, dtype=np.int64)


def load(begin: int, end: int) -> np.ndarray:
    return ROWS[begin:end]


def dataset(data: DataShards) -> tf.data.Dataset:
    return data.dataset(load, tf.TensorSpec((None,), tf.int64), batch_size=2, prefetch=4)


data = DataShards("train", size=40, shard_size=10)
reported: list[tuple[int, int]] = []
data._queue.use = lambda number, offset: reported.append((number, offset)) or True
rows: list[int] = []
third: list[tuple[int, int]] = []
for count, batch in enumerate(dataset(data), start=1):
    rows += batch.numpy().tolist()
    if count == 3:
        third = reported[-1:]
print(f"eager {len(rows)} rows, sum {sum(rows)}; reported at the third batch: {third}")
assert reported[-1] == (3, 40), reported

with tf.Graph().as_default():
    batch = tf.compat.v1.data.make_one_shot_iterator(dataset(DataShards("train", 40, 10))).get_next()
    rows = []
    with tf.compat.v1.Session() as session:
        while True:
            try:
                rows += session.run(batch).tolist()
            except tf.errors.OutOfRangeError:
                break
print(f"graph {len(rows)} rows, sum {sum(rows)}")
