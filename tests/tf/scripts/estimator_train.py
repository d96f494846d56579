"""Trains a small linear model with tf.estimator, as scripts for TensorFlow 1 do. It uses nothing of tf-ps-run.

MODEL_DIR and LAST_STEP are environment variables, and so is SAVE_STEPS, the number of steps between checkpoints.
"""

import os
import time

import numpy as np
import tensorflow.compat.v1 as tf

tf.logging.set_verbosity(tf.logging.INFO)


def examples(seed):
    """Batches of eight, without an end, and at a limited rate."""
    rng = np.random.default_rng(seed)
    while True:
        time.sleep(0.02)
        values = rng.normal(size=(8, 4)).astype(np.float32)
        yield {"x": values}, values.sum(axis=1, keepdims=True)


def train_input():
    types = ({"x": tf.float32}, tf.float32)
    return tf.data.Dataset.from_generator(lambda: examples(os.getpid()), types, ({"x": (8, 4)}, (8, 1)))


def eval_input():
    return train_input().take(5)


def main():
    config = tf.estimator.RunConfig(
        model_dir=os.environ["MODEL_DIR"], save_checkpoints_steps=int(os.environ.get("SAVE_STEPS", "50"))
    )
    model = tf.estimator.LinearRegressor([tf.feature_column.numeric_column("x", shape=[4])], config=config)
    tf.estimator.train_and_evaluate(
        model,
        tf.estimator.TrainSpec(train_input, max_steps=int(os.environ.get("LAST_STEP", "100000"))),
        tf.estimator.EvalSpec(eval_input, start_delay_secs=0, throttle_secs=1),
    )
    print("finished", flush=True)


main()
