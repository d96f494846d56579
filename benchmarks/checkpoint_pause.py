"""For how long a checkpoint stops the training loop: in memory, beside one that is written to the disk at once. See
`benchmarks/README.md`.

One worker saves the same state in turns, to the disk and in memory; the judged figure is the ratio of each turn, so
that a changing load affects both alike. The next save begins when the last one is on the disk. The first turn is shown
apart: only from the second save in memory on is there memory that was prepared for it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from core.launchers import OURS, WORKERS
from core.ratios import Lost
from core.report import Table
from core.series import Kept, Series, measured

TIMEOUT = 1800.0

REST = 1.0
"""Seconds between two saves, in which a real loop would compute."""


@dataclass(frozen=True)
class Turn:
    """The seconds for which the loop stood still in two saves of one state, and the processor time of the worker in
    them: a save in memory waits for nothing else, so on an idle machine that is its pause."""

    disk: float
    disk_processor: float
    memory: float
    memory_processor: float

    @property
    def ratio(self) -> float:
        return self.memory / self.disk


def turns_of(printed: str) -> list[Turn]:
    """The turns that a worker has printed."""
    lines = (line.split() for line in printed.splitlines())
    return [Turn(*map(float, words[1:])) for words in lines if len(words) == 5 and words[0] == "pause"]


class Key(NamedTuple):
    """One job: the size of its state, and how many turns follow the first."""

    megabytes: int
    turns: int


@dataclass(frozen=True)
class Job:
    """The turns of one job, the first one included."""

    key: Key
    turns: Sequence[Turn]


def measure(key: Key, folder: Path | None) -> Job:
    """Run a job on the disk of a folder. Raises Lost."""
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        script = [str(WORKERS / "pausing.py"), str(key.megabytes), str(key.turns + 1), str(REST)]
        job = subprocess.run([*OURS, *script], cwd=directory, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT)
    if job.returncode != 0:
        raise Lost(f"the job ended with {job.returncode}")
    return Job(key, turns_of(job.stdout))


HEAD = ("turn", "which", "to the disk", "processor", "in memory", "processor", "ratio")

FIGURES = ("disk", "disk_processor", "memory", "memory_processor")


def row(name: str, which: str, turns: Sequence[Turn]) -> list[str]:
    """The row of the medians of these turns."""
    seconds = [f"{median(getattr(one, figure) for one in turns):.3f} s" for figure in FIGURES]
    return [name, which, *seconds, f"{median(one.ratio for one in turns):.3f}"]


def tables(kept: Sequence[Kept[Job]]) -> list[Table]:
    """A table for each size."""
    found = []
    for one in kept:
        key, turns = one.run.key, one.run.turns
        rows = [row(str(number), "first" if number == 0 else "", [each]) for number, each in enumerate(turns)]
        rows.append(row("median", "without the first", turns[1:]))
        how = (
            f"one worker with a state of {key.megabytes} MB, which saves it in turns; the target is a ratio of 0.1 "
            "in the median"
        )
        found.append(Table(f"{key.megabytes} MB, {key.turns} turns", measured([one], how), HEAD, rows, text=(1,)))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line says; return 0."""
    parser = argparse.ArgumentParser(description="For how long a checkpoint stops the training loop.")
    parser.add_argument("--megabytes", type=int, default=500, help="size of the state (default: 500)")
    parser.add_argument("--turns", type=int, default=10, help="saves of each kind after the first (default: 10)")
    parser.add_argument("--directory", type=Path, help="folder on the disk that is measured (default: TMPDIR)")
    series_of(None).add_options(parser)
    options = parser.parse_args(arguments)
    if min(options.megabytes, options.turns) <= 0:
        parser.error("--megabytes and --turns must be above 0")
    return series_of(options.directory).run(parser, options, [Key(options.megabytes, options.turns)])


def series_of(folder: Path | None) -> Series[Job]:
    """The jobs on the disk of a folder."""
    return Series(
        "The pause of a checkpoint",
        "checkpoints/checkpoint_pause",
        Job,
        lambda key: measure(key, folder),
        tables,
        lambda job: " | ".join(row("median", "without the first", job.turns[1:])),
    )


if __name__ == "__main__":
    sys.exit(main())
