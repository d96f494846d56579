"""Train DeepFM on a click log with parameter servers, with TensorFlow's ParameterServerStrategy.

    python deepfm_strategy.py
    tf-ps-run --ps=2 --workers=1 deepfm_strategy.py

The chief alone runs the program, and hands steps to the workers. `TF_CONFIG` says which process of which cluster this
is; without it this process trains alone. The optimizer is that of Keras 2: Keras 3 has none for parameter servers.
"""

from __future__ import annotations

import argparse
import os
from itertools import islice
from typing import Any

import tensorflow as tf
from criteo import CATEGORIES, COUNTS, Lines, blocks_by_chance, blocks_of_the_job
from evaluate import follow
from features import FACTORS, HIDDEN, LEARNING_RATE, TABLE_ROWS, Tensor, add_up, input_of_layers, loss_of, number, parse
from generate import generate
from options import parse_arguments

try:
    import tf_keras as keras
except ImportError:  # before TensorFlow 2.16, where Keras 2 is the Keras of TensorFlow
    from tensorflow import keras

PART_BYTES = 64 << 10
"""A table is cut into parts of this size or more, one for each server at most."""


class DeepFM(tf.Module):
    """The model and its variables."""

    def __init__(self) -> None:
        super().__init__()
        # An initial value that is a function is made part by part, on the server of each part.
        small = tf.random_normal_initializer(stddev=0.01)
        self.linear = tf.Variable(lambda: small([TABLE_ROWS, 1]), name="linear")
        self.factors = tf.Variable(lambda: small([TABLE_ROWS, FACTORS]), name="factors")
        widths = [CATEGORIES * FACTORS + COUNTS, *HIDDEN, 1]
        self.weights = [
            tf.Variable(tf.random.normal([above, below], stddev=(2 / (above + below)) ** 0.5))
            for above, below in zip(widths, widths[1:])
        ]
        self.biases = [tf.Variable(tf.zeros([width])) for width in widths[1:]]

    def __call__(self, counts: Tensor, categories: Tensor) -> Tensor:
        """The logarithm of the odds of a click."""
        rows = number(categories)
        factors = tf.nn.embedding_lookup(self.factors, rows)
        deep = input_of_layers(factors, counts)
        for weights, bias in zip(self.weights[:-1], self.biases):
            deep = tf.nn.relu(deep @ weights + bias)
        deep = deep @ self.weights[-1] + self.biases[-1]
        return add_up(tf.nn.embedding_lookup(self.linear, rows), factors, deep)


class Alone:
    """What a coordinator does, for a process without a cluster."""

    def schedule(self, step: Any, args: tuple[Any, ...]) -> Any:
        return step(*args)

    def join(self) -> None:
        pass


def train(args: argparse.Namespace, resolver: Any) -> None:
    """Have the steps taken, and save between them, when none is on its way."""
    strategy, coordinator = tf.distribute.get_strategy(), Alone()
    if servers := resolver.cluster_spec().as_dict().get("ps"):
        cut = tf.distribute.experimental.partitioners.MinSizePartitioner(PART_BYTES, len(servers))
        strategy = tf.distribute.ParameterServerStrategy(resolver, cut)
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    lines = Lines(args.data / "train.tsv")
    blocks = len(lines) // args.batch_size
    places = blocks_of_the_job(blocks, args.steps) if args.shards else blocks_by_chance(blocks)
    with strategy.scope():
        model = DeepFM()
        optimizer = keras.optimizers.Adagrad(LEARNING_RATE)
        optimizer.build(model.trainable_variables)
        # How often each block was trained on, beside what was learned from it, so that a checkpoint proves it.
        seen = tf.Variable(tf.zeros([blocks], tf.int32), trainable=False)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, step=optimizer.iterations, seen=seen)
    manager = tf.train.CheckpointManager(checkpoint, str(args.checkpoints), max_to_keep=5, checkpoint_name="model.ckpt")
    checkpoint.restore(manager.latest_checkpoint)

    def update(rows: Tensor, block: Tensor) -> Tensor:
        clicked, counts, categories = parse(rows)
        with tf.GradientTape() as tape:
            loss = loss_of(model(counts, categories), clicked)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        seen.scatter_add(tf.IndexedSlices(1, block))
        return loss

    @tf.function
    def step(rows: Tensor, block: Tensor) -> Tensor:
        return strategy.run(update, (rows, block))

    while args.shards or optimizer.iterations < args.steps:
        loss = None
        left = args.steps - int(optimizer.iterations)
        for place in islice(places, args.save_steps if args.shards else min(args.save_steps, left)):
            begin = place * args.batch_size
            text = tf.constant(lines.read(begin, begin + args.batch_size))
            loss = coordinator.schedule(step, (text, tf.constant(place)))
        if loss is None:
            break
        coordinator.join()
        manager.save(optimizer.iterations)
        print(f"step {int(optimizer.iterations)}: loss {float(loss.fetch() if servers else loss):.4f}", flush=True)


def predict(checkpoint: str, lines: list[bytes]) -> Tensor:
    """The scores that the model of a checkpoint gives to rows."""
    model = DeepFM()
    tf.train.Checkpoint(model=model).restore(checkpoint).expect_partial()
    _, counts, categories = parse(lines)
    return model(counts, categories).numpy()


def main() -> None:
    args = parse_arguments(__doc__)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type == "evaluator":
        follow(args, predict)
        return
    print(f"{resolver.task_type or 'chief'} {resolver.task_id or 0}: pid = {os.getpid()}", flush=True)
    if resolver.task_type in ("worker", "ps"):
        tf.distribute.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
    generate(args.data)
    train(args, resolver)


if __name__ == "__main__":
    tf.get_logger().setLevel("ERROR")
    main()
