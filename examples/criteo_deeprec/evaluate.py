"""Say how well a checkpoint foretells clicks, and which blocks of the data it was trained on.

    python evaluate.py --data criteo_data --checkpoints checkpoints

It reads the checkpoint as it is, whatever cluster has written it, and in whichever of the two ways.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf
from criteo import Lines, area_under_curve
from generate import generate
from options import parse_arguments

Predict = Callable[[str, list], np.ndarray]

STEP_NAMES = ("global_step", "step/.ATTRIBUTES/VARIABLE_VALUE")
SEEN_NAMES = ("seen", "seen/.ATTRIBUTES/VARIABLE_VALUE")
"""What a variable is called in a checkpoint of graph mode, and in one of a strategy."""


def evaluate(checkpoint: str, data: Path, predict: Predict) -> dict[str, float | int]:
    """AUC on the evaluation rows, and the smallest and the largest number of times that any block was trained on."""
    lines = Lines(data / "evaluation.tsv")
    text = lines.read(0, len(lines))
    clicked = np.array([line.startswith(b"1") for line in text])
    seen = _variable(checkpoint, SEEN_NAMES)
    return {
        "step": int(_variable(checkpoint, STEP_NAMES)),
        "auc": round(area_under_curve(predict(checkpoint, text), clicked), 4),
        "blocks_seen": int((seen > 0).sum()),
        "blocks_seen_more_than_once": int((seen > 1).sum()),
    }


def follow(args: argparse.Namespace, predict: Predict) -> None:
    """Evaluate each checkpoint that appears, until the last one: what the evaluator of a cluster does."""
    generate(args.data)
    for checkpoint in tf.train.checkpoints_iterator(str(args.checkpoints)):
        found = evaluate(checkpoint, args.data, predict)
        print(json.dumps(found), flush=True)
        if found["step"] >= args.steps:
            break


def _variable(checkpoint: str, names: tuple[str, ...]) -> np.ndarray:
    reader = tf.train.load_checkpoint(checkpoint)
    return reader.get_tensor(next(name for name in names if reader.has_tensor(name)))


def main() -> None:
    args = parse_arguments(__doc__)
    checkpoint = tf.train.latest_checkpoint(str(args.checkpoints))
    if checkpoint is None:
        raise SystemExit(f"there is no checkpoint in {args.checkpoints}")
    # Each of them imports this module, too.
    if tf.train.load_checkpoint(checkpoint).has_tensor("seen"):
        from deepfm_graph import predict
    else:
        from deepfm_strategy import predict
    print(json.dumps(evaluate(checkpoint, args.data, predict)))


if __name__ == "__main__":
    main()
