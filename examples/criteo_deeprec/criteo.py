"""The rows of a click log in the format of the Criteo Display Advertising set, and how well clicks are foretold.

A row is a line of 40 columns with tabs between them: clicked or not, 13 counts, 26 categories in hexadecimal. Each but
the first may be empty.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np

COUNTS, CATEGORIES = 13, 26

BLOCKS_OF_A_SHARD = 10
"""How many blocks of rows a process takes at a time."""


class Lines:
    """The lines of a file, by number; they are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        ends = np.flatnonzero(np.frombuffer(self._bytes, np.uint8) == ord("\n"))
        self._ends = np.concatenate(([-1], ends))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def read(self, begin: int, end: int) -> list[bytes]:
        """The lines from `begin` up to `end`."""
        return self._bytes[self._ends[begin] + 1 : self._ends[end]].split(b"\n")


def blocks_by_chance(count: int) -> Iterator[int]:
    """Numbers of blocks without end: all of them in an order by chance, and then all again in another."""
    chance = np.random.default_rng()
    while True:
        yield from chance.permutation(count).tolist()


def blocks_of_the_job(count: int, steps: int) -> Iterator[int]:
    """Numbers of blocks, each of which goes to one process of the job: `steps` of them, or as many whole epochs of all
    as that is. What a process that dies had not used goes to another.

    To be called before the model is restored, for what was handed out goes back with it.
    """
    from tf_ps_runner.hooks import DataShards

    shards = DataShards(
        "blocks", size=min(count, steps), shard_size=BLOCKS_OF_A_SHARD, epochs=max(1, steps // count), shuffle=True
    )
    return (block for block, _ in shards.batches(1))


def area_under_curve(scores: np.ndarray, clicked: np.ndarray) -> float:
    """The probability that a row that was clicked scores higher than one that was not; a tie counts half."""
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]
    positives = int(clicked.sum())
    negatives = len(clicked) - positives
    return float((ranks[clicked].sum() - positives * (positives + 1) / 2) / (positives * negatives))
