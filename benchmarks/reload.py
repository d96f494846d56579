"""From a save to the first line of all ranks: `--reload`, and restarts with a fresh interpreter. See
`benchmarks/README.md`.

Two rivals have no way to start again by a save, so the benchmark restarts them in the moment of the save, as a watcher
without any delay would: it ends torchrun, or the workers where there is no launcher, and starts them again. In each
turn every rival starts once, and the judged figure is the ratio of each turn.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from core.launchers import FLOOR, OURS, TORCHRUN, WORKERS, Job, Launcher
from core.processes import wait_for_end
from core.ratios import Lost
from core.report import Table
from core.run import NANOSECOND, Run
from core.series import Kept, Series, measured, quantile

RELOAD = Launcher("dlrover-run --reload", OURS, ("--reload",))
NAMES = (RELOAD.name, TORCHRUN.name, FLOOR.name)

SIZES = (1, 2, 4)
SESSIONS = 6
SAVES = 5
"""Saves of one session: thirty of each size in all."""

TARGET = 0.3

START_TIMEOUT = 300.0
SETTLE = 3.0
"""Seconds before the first save of a session, in which the template imports what the workers have imported."""

REST = 0.5
"""Seconds between two turns."""

SCRIPT = f"""\
import torch

import model

import sys

sys.path.insert(0, {str(WORKERS)!r})

from reporting import open_gate, report, wait_at

gate = open_gate()
report("ready")
wait_at(gate)
"""


class Key(NamedTuple):
    """One session: how many workers a job has, and the number of the session."""

    workers: int
    session: int


@dataclass(frozen=True)
class Session:
    """The seconds from each save to the first line of the last rank, in the order of `NAMES`."""

    key: Key
    turns: Sequence[Sequence[float]]


class Rival:
    """A job of one rival in a directory of its own, with a module that is saved again and again."""

    def __init__(self, run: Run, workers: int) -> None:
        self.run = run
        self.script = run.directory / "train.py"
        self.module = run.directory / "model.py"
        self.script.write_text(SCRIPT)
        self.job = Job(str(self.script), workers)
        self._saves = 0
        self._save()

    def start(self, start: Callable[[Run, Job], int]) -> None:
        """Start the job for the first time."""
        began = start(self.run, self.job)
        self.run.wait("ready", self.job.workers, START_TIMEOUT, after_ns=began)

    def turn(self, again: Callable[[Run, Job], object]) -> float:
        """Save the module, and do what starts the job again; the seconds until all ranks have begun."""
        began = time.monotonic_ns()
        self._save()
        again(self.run, self.job)
        found = self.run.wait("ready", self.job.workers, START_TIMEOUT, after_ns=began)
        return (max(one.at_ns for one in found) - began) * NANOSECOND

    def _save(self) -> None:
        self._saves += 1
        self.module.write_text(f"VALUE = {self._saves}\n")


def end(run: Run) -> None:
    """End what runs, as a watcher does, and wait for that."""
    running = [one.pid for one in run.launchers if one.poll() is None]
    for pid in running:
        os.kill(pid, signal.SIGTERM)
    if wait_for_end(running, START_TIMEOUT):
        raise Lost("the last start did not end")


def restart(start: Callable[[Run, Job], int]) -> Callable[[Run, Job], object]:
    """What starts a job again that does not see a save."""

    def again(run: Run, job: Job) -> None:
        end(run)
        start(run, job)

    return again


def measure(key: Key) -> Session:
    """One session: all rivals run, and each has its turn after each save. Raises Lost."""
    with Run() as ours, Run() as theirs, Run() as floor:
        rivals = [Rival(run, key.workers) for run in (ours, theirs, floor)]
        starts = (RELOAD.start, TORCHRUN.start, FLOOR.start)
        for rival, start in zip(rivals, starts, strict=True):
            rival.start(start)
            # They never end by themselves, and ours waits for the next save.
            rival.run.ends_by_itself = False
        ours.settle(SETTLE)
        again = (lambda run, job: None, restart(TORCHRUN.start), restart(FLOOR.start))
        turns = []
        for _ in range(SAVES):
            turns.append([rival.turn(act) for rival, act in zip(rivals, again, strict=True)])
            ours.settle(REST)
    return Session(key, turns)


HEAD = ("workers", "rival", "median", "95 %", "saves", "longer than ours", "spread")


def tables(kept: Sequence[Kept[Session]]) -> list[Table]:
    """The table of all sizes."""
    rows = []
    for workers in sorted({one.run.key.workers for one in kept}):
        turns = [turn for one in kept if one.run.key.workers == workers for turn in one.run.turns]
        for rival, name in enumerate(NAMES):
            seconds = [turn[rival] for turn in turns]
            ratios = [turn[rival] / turn[0] for turn in turns]
            often = ["-", "-"] if not rival else [f"{median(ratios):.1f} x", f"{min(ratios):.1f} to {max(ratios):.1f}"]
            figures = [f"{median(seconds):.2f} s", f"{quantile(seconds, 0.95):.2f} s", str(len(seconds))]
            rows.append([str(workers), name, *figures, *often])
    how = f"from the save to the first line of all ranks, after `import torch`; target of ours: {TARGET:g} s"
    return [Table("reload", measured(kept, how), HEAD, rows, text=(1,))]


def line(one: Session) -> str:
    """What came of a session."""
    figures = (f"{name} {median(turn[rival] for turn in one.turns):.2f} s" for rival, name in enumerate(NAMES))
    return f"{one.key.workers} workers, session {one.key.session}: {', '.join(figures)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all sessions; return 0."""
    parser = argparse.ArgumentParser(description="From a save to the first line of all ranks.")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of workers")
    parser.add_argument("--sessions", type=int, default=SESSIONS, help=f"sessions of {SAVES} saves for each size")
    SERIES.add_options(parser)
    options = parser.parse_args(arguments)
    wanted = [Key(workers, session) for session in range(options.sessions) for workers in options.sizes]
    return SERIES.run(parser, options, wanted)


SERIES = Series("From a save to the first line", "reload", Session, measure, tables, line)

if __name__ == "__main__":
    sys.exit(main())
