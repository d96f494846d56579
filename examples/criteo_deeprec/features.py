"""What DeepFM is given, and the part of it that has no variables: the same for both ways to train it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from criteo import CATEGORIES, COUNTS

ROWS_OF_A_COLUMN = 1000
"""How many rows of a table the values of one column of categories share."""

TABLE_ROWS = CATEGORIES * ROWS_OF_A_COLUMN
FACTORS = 8
HIDDEN = (64, 32)
LEARNING_RATE = 0.1

Tensor = Any
"""TensorFlow has no types that could be checked."""


def parse(lines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows of text: clicked or not, the counts brought to numbers around 1, and the categories as text."""
    columns = tf.io.decode_csv(lines, [[0.0]] * (1 + COUNTS) + [[""]] * CATEGORIES, field_delim="\t")
    counts = tf.stack(columns[1 : 1 + COUNTS], axis=1)
    return columns[0], tf.math.log1p(tf.maximum(counts, 0.0)), tf.stack(columns[1 + COUNTS :], axis=1)


def number(categories: Tensor, rows_of_a_column: int = ROWS_OF_A_COLUMN) -> Tensor:
    """Which rows of a table belong to these categories, each column of which has rows of its own."""
    column = tf.range(CATEGORIES, dtype=tf.int64)
    return tf.strings.to_hash_bucket_fast(categories, rows_of_a_column) + column * rows_of_a_column


def add_up(linear: Tensor, factors: Tensor, deep: Tensor) -> Tensor:
    """The score of each row: of its categories by themselves, of all pairs of them, and of the layers."""
    pairs = tf.square(tf.reduce_sum(factors, axis=1)) - tf.reduce_sum(tf.square(factors), axis=1)
    return tf.reduce_sum(linear, axis=[1, 2]) + tf.reduce_sum(pairs, axis=1) / 2 + tf.squeeze(deep, axis=1)


def input_of_layers(factors: Tensor, counts: Tensor) -> Tensor:
    """What the first of the layers is given."""
    return tf.concat([tf.reshape(factors, [-1, CATEGORIES * FACTORS]), counts], axis=1)


def loss_of(scores: Tensor, clicked: Tensor) -> Tensor:
    """The mean of the cross entropy."""
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=clicked, logits=scores))
