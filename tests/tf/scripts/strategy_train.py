"""A script for ParameterServerStrategy as users write it: it uses nothing of tf-ps-run except, with SHARDS, its data.

It trains STEPS steps in all, over any number of starts; each adds 1 to a counter and trains a partitioned table. With
UNTIL it trains on until there is a file of that name. EXTRA is one more variable, as NAME:DTYPE, which is not saved.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator
from itertools import count

if importlib.util.find_spec("tf_keras"):
    # TensorFlow 2.15 has its own optimizer of this kind.
    os.environ["TF_USE_LEGACY_KERAS"] = "1"

import tensorflow as tf

STEPS, EVERY = int(os.environ.get("STEPS", "200")), int(os.environ.get("SAVE_EVERY", "50"))
PAUSE = float(os.environ.get("STEP_SECONDS", "0.01"))
ROWS, WIDTH = 64, 4
UNTIL = os.environ.get("UNTIL", "")
LOOKUP = tf.compat.v1.nn.embedding_lookup if os.environ.get("LOOKUP") == "mod" else tf.nn.embedding_lookup


def parts_of(variable: tf.Variable) -> list[tf.Variable]:
    return list(getattr(variable, "variables", [variable]))


def iter_steps(first: int) -> Iterator[int]:
    """The numbers of the steps from `first` on."""
    for step in count(first):
        if step >= STEPS and (not UNTIL or os.path.exists(UNTIL)):
            return
        yield step


def main() -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    print(f"{resolver.task_type} {resolver.task_id}: pid = {os.getpid()}", flush=True)
    if resolver.task_type in ("worker", "ps"):
        server = tf.distribute.Server(
            resolver.cluster_spec(),
            job_name=resolver.task_type,
            task_index=resolver.task_id,
            protocol="grpc",
            start=True,
        )
        server.join()
    parts = tf.distribute.experimental.partitioners.FixedShardsPartitioner(len(resolver.cluster_spec().job_tasks("ps")))
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=parts)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        table = tf.Variable(tf.reshape(tf.range(ROWS * WIDTH, dtype=tf.float32), [ROWS, WIDTH]), name="table")
        seen = tf.Variable(tf.zeros([ROWS], tf.int64), name="seen")
        optimizer = tf.keras.optimizers.Adagrad(0.01)
        name, _, dtype = os.environ.get("EXTRA", "").partition(":")
        extra = tf.Variable(tf.zeros([4], dtype), name=name) if name else None
    step = optimizer.iterations
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, table=table, seen=seen)
    manager = tf.train.CheckpointManager(checkpoint, os.environ["MODEL_DIR"], max_to_keep=3)
    restored = manager.restore_or_initialize()
    print(f"begin at {int(step)} restored={restored} extra={extra is not None}", flush=True)

    @tf.function
    def train(begin: tf.Tensor, end: tf.Tensor) -> tf.Tensor:
        def replica() -> tf.Tensor:
            ids = tf.range(begin, end)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(LOOKUP(table, ids) - 1.0))
            variables = parts_of(table)
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            for part, offset in zip(parts_of(seen), offsets, strict=True):
                size = int(part.shape[0])
                mine = tf.cast((tf.range(size) + offset >= begin) & (tf.range(size) + offset < end), tf.int64)
                part.assign_add(mine)
            return loss

        return strategy.run(replica)

    offsets, offset = [], 0
    for part in parts_of(seen):
        offsets.append(offset)
        offset += int(part.shape[0])

    if "shards" in sys.argv[1:] or os.environ.get("SHARDS"):
        from tf_ps_runner.hooks import DataShards

        ranges = DataShards("train", ROWS, 8, epochs=int(os.environ.get("EPOCHS", "20")), shuffle=True, seed=3).batches(
            4
        )
    else:
        ranges = (((4 * i) % ROWS, (4 * i) % ROWS + 4) for i in iter_steps(int(step)))
    if os.environ.get("DIE_BEFORE_STEPS"):
        os.kill(os.getpid(), signal.SIGKILL)
    for number, (begin, end) in enumerate(ranges, start=1):
        coordinator.schedule(train, args=(tf.constant(begin), tf.constant(end)))
        time.sleep(PAUSE)
        if number % EVERY == 0:
            coordinator.join()
            manager.save()
            print(f"saved at {int(step)}", flush=True)
    coordinator.join()
    manager.save()
    counted = tf.concat([part.read_value() for part in parts_of(seen)], 0).numpy()
    print(f"done at {int(step)} seen={counted.min()}..{counted.max()}", flush=True)


main()
