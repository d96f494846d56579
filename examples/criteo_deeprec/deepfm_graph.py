"""Train DeepFM on a click log with parameter servers, in TensorFlow's graph mode.

    python deepfm_graph.py
    tf-ps-run --ps=2 --workers=1 deepfm_graph.py

It knows nothing of who starts it: `TF_CONFIG` says which process of which cluster this is, and without it this process
trains alone. With DeepRec its embedding variables hold a row for each category that was seen; with any other TensorFlow
from 1.15 on the categories share the rows of a table, which is cut into as many parts as there are servers.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import tensorflow.compat.v1 as tf
from criteo import Lines, blocks_by_chance, blocks_of_the_job
from evaluate import follow
from features import FACTORS, HIDDEN, LEARNING_RATE, TABLE_ROWS, Tensor, add_up, input_of_layers, loss_of, number, parse
from generate import generate
from options import parse_arguments

HAS_EMBEDDING_VARIABLES = hasattr(tf, "get_embedding_variable")
"""Whether this TensorFlow is DeepRec."""


def look_up(name: str, width: int, categories: Tensor, partitioner: Any) -> Tensor:
    """The rows of the table `name` that belong to these categories."""
    start = tf.random_normal_initializer(stddev=0.01)
    if HAS_EMBEDDING_VARIABLES:
        table = tf.get_embedding_variable(name, width, initializer=start, partitioner=partitioner)
        return tf.nn.embedding_lookup(table, number(categories, rows_of_a_column=1 << 58))
    table = tf.get_variable(name, [TABLE_ROWS, width], initializer=start, partitioner=partitioner)
    # With "mod", which is the default, a row would be another one once the number of servers has changed.
    return tf.nn.embedding_lookup(table, number(categories), partition_strategy="div")


def layer(name: str, inputs: Tensor, width: int) -> Tensor:
    """A linear layer; TensorFlow 2.16 and later have none for graph mode."""
    with tf.variable_scope(name):
        weights = tf.get_variable("weights", [inputs.shape[1], width], initializer=tf.glorot_uniform_initializer())
        return tf.matmul(inputs, weights) + tf.get_variable("bias", [width], initializer=tf.zeros_initializer())


def score(counts: Tensor, categories: Tensor, partitioner: Any) -> Tensor:
    """The logarithm of the odds of a click."""
    factors = look_up("factors", FACTORS, categories, partitioner)
    deep = input_of_layers(factors, counts)
    for place, width in enumerate(HIDDEN):
        deep = tf.nn.relu(layer(f"hidden_{place}", deep, width))
    return add_up(look_up("linear", 1, categories, partitioner), factors, layer("output", deep, 1))


def train(args: argparse.Namespace, cluster: Any, server: Any, role: str, index: int) -> None:
    """Take steps until there have been enough of them, or the blocks of rows of the job are used up."""
    lines = Lines(args.data / "train.tsv")
    blocks = len(lines) // args.batch_size
    places = blocks_of_the_job(blocks, args.steps) if args.shards else blocks_by_chance(blocks)
    servers = cluster.num_tasks("ps") if server else 1
    me = f"/job:{role}/task:{index}"
    with tf.device(tf.train.replica_device_setter(cluster=cluster, worker_device=me) if server else None):
        rows, block = tf.placeholder(tf.string, [None]), tf.placeholder(tf.int32, [])
        clicked, counts, categories = parse(rows)
        loss = loss_of(score(counts, categories, tf.fixed_size_partitioner(servers)), clicked)
        step = tf.train.get_or_create_global_step()
        # How often each block was trained on, beside what was learned from it, so that a checkpoint proves it.
        seen = tf.get_variable("seen", [blocks], tf.int32, tf.zeros_initializer(), trainable=False)
        with tf.control_dependencies([tf.train.AdagradOptimizer(LEARNING_RATE).minimize(loss)]):
            update = [tf.assign_add(step, 1, use_locking=True), tf.scatter_add(seen, block, 1)]
    with tf.train.MonitoredTrainingSession(
        master=server.target if server else "",
        is_chief=role == "chief",
        checkpoint_dir=str(args.checkpoints),
        save_checkpoint_steps=args.save_steps,
        save_summaries_steps=None,
        log_step_count_steps=None,
        hooks=[] if args.shards else [tf.train.StopAtStepHook(last_step=args.steps)],
        # A session that may see more than the servers waits for all other workers.
        config=tf.ConfigProto(device_filters=["/job:ps", me]) if server else None,
    ) as session:
        for place in places:
            if session.should_stop():
                break
            begin = place * args.batch_size
            feed = {rows: lines.read(begin, begin + args.batch_size), block: place}
            (at, _), cost = session.run([update, loss], feed)
            if at % args.print_steps == 0:
                print(f"step {at}: loss {cost:.4f}", flush=True)


def predict(checkpoint: str, lines: list[bytes]) -> Tensor:
    """The scores that the model of a checkpoint gives to rows."""
    with tf.Graph().as_default(), tf.Session() as session:
        _, counts, categories = parse(tf.constant(lines))
        scores = score(counts, categories, None)
        tf.train.Saver().restore(session, checkpoint)
        return session.run(scores)


def main() -> None:
    args = parse_arguments(__doc__)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    cluster, role, index = resolver.cluster_spec(), resolver.task_type or "chief", resolver.task_id or 0
    if role == "evaluator":
        follow(args, predict)
        return
    print(f"{role} {index}: pid = {os.getpid()}", flush=True)
    server = tf.distribute.Server(cluster, role, index) if cluster.jobs else None
    if role == "ps":
        server.join()
    generate(args.data)
    train(args, cluster, server, role, index)


if __name__ == "__main__":
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    main()
