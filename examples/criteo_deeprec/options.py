"""The flags of both scripts."""

from __future__ import annotations

import argparse
from pathlib import Path


def parse_arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("criteo_data"), help="train.tsv is there, or is made there")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), help="save here, and go on from here")
    parser.add_argument("--steps", type=int, default=780, help="of all processes; 780 go once through the data")
    parser.add_argument("--batch-size", type=int, default=256, help="rows of one step, which are one block of the data")
    parser.add_argument("--save-steps", type=int, default=50, help="from one checkpoint to the next")
    parser.add_argument("--print-steps", type=int, default=50, help="from one line with the loss to the next")
    parser.add_argument(
        "--shards", action="store_true", help="let tf-ps-run share the blocks out: each to one process, once an epoch"
    )
    args = parser.parse_args()
    for name in ("steps", "batch_size", "save_steps", "print_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    return args
