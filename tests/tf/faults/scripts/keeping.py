"""What `paced.py` does, in the children of a process that keeps: the rows of the data are loaded once, and `read` gives
those that were loaded.

    tf-ps-run ... keeping.py deepfm_graph.py --shards ...

TensorFlow is imported before, as scripts do, so that no child has to.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import paced
import tensorflow  # noqa: F401

from tf_ps_runner import hooks


def option(name: str) -> str:
    """The value of `--name=value` on the command line."""
    return next(word.partition("=")[2] for word in sys.argv if word.startswith(f"--{name}="))


def load() -> list[bytes]:
    rows = (Path(option("data")) / "train.tsv").read_bytes().splitlines()
    print(f"{len(rows)} rows were loaded by {os.getpid()}", flush=True)
    return rows


def train(rows: list[bytes]) -> None:
    """Train on the rows that were loaded: the example asks its own class for them."""
    sys.path.insert(0, str(paced.EXAMPLE))
    import criteo

    def read(self: Any, begin: int, end: int) -> list[bytes]:
        return rows[begin:end]

    criteo.Lines.read = read
    print(f"the child {os.getpid()} of {os.getppid()} trains on {len(rows)} rows", flush=True)
    paced.main()


if __name__ == "__main__":
    loaded = load() if paced.ROLE in ("chief", "worker") else []
    hooks.rebuild(lambda: train(loaded))
