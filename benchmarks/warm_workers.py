"""What `--warm-workers` saves of a restart: a worker is killed whose start takes seconds after its fork. See
`benchmarks/README.md`.

The seconds are by construction: a module that sleeps while it is imported and leaves a thread running, so that no
template imports it. A device that has to be opened takes as long, and is not measured here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from core.cases import Limits
from core.launchers import FORKSERVER, WORKERS, Job
from core.ratios import Lost
from core.report import Table
from core.run import NANOSECOND, Run
from core.series import Kept, Series, measured

SLOW = 5.0
"""Seconds that the import of the module takes."""

TURNS = 3

MODULE = f"""\
import threading
import time

time.sleep({SLOW})
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""

SCRIPT = """\
import slow_module
from reporting import report

import dlrover_run.training

number = 0
while True:
    dlrover_run.training.report()
    if number == 0:
        report("step")
    number += 1
    slow_module.time.sleep(0.01)
"""

PREPARED = '"dlrover.worker.prepared"'
"""The event of a warm worker in the event log."""

WAYS = ("forkserver", "warm workers")


class Key(NamedTuple):
    """One kill: with which launcher, and in which turn."""

    way: str
    turn: int


class Row(NamedTuple):
    """The `seconds` from SIGKILL of one of two workers to the first step of both in the next round."""

    way: str
    turn: int
    seconds: float

    @property
    def key(self) -> Key:
        return Key(self.way, self.turn)


def measure(key: Key, limits: Limits) -> Row:
    """Start two workers, kill one once they train, and wait for the first step of both. Raises Lost."""
    warm = key.way == "warm workers"
    with Run() as run:
        site, journal = run.directory / "lib" / "site-packages", run.directory / "journal"
        site.mkdir(parents=True)
        (site / "slow_module.py").write_text(MODULE)
        script = run.directory / "script.py"
        script.write_text(SCRIPT)
        options = (*FORKSERVER.options, f"--journal={journal}", *(("--warm-workers",) if warm else ()))
        path = os.pathsep.join([str(site), str(WORKERS), *filter(None, [os.environ.get("PYTHONPATH")])])
        launcher = replace(FORKSERVER, options=options, environment={**FORKSERVER.environment, "PYTHONPATH": path})
        job = Job(str(script), workers=2, max_restarts=1)
        launcher.start(run, job)
        workers = run.wait("step", job.workers, limits.start)
        for _ in range(int(limits.start) if warm else 0):
            if sum(log.read_text().count(PREPARED) for log in journal.rglob("*.jsonl")) >= job.workers:
                break
            run.settle(1.0)
        run.settle(limits.settle)
        killed = run.kill(workers[1].pid)
        again = run.wait("step", job.workers, limits.recovery, first_attempt=1)
        if len(again) < job.workers:
            raise Lost("not all workers have come back")
    return Row(*key, max(step.at_ns - killed for step in again) * NANOSECOND)


HEAD = ("launcher", "kill to step", "each", "ratio")


def tables(kept: Sequence[Kept[Row]]) -> list[Table]:
    """The table of both ways."""
    times = {way: [one.run.seconds for one in kept if one.run.way == way] for way in WAYS}
    base = median(times[WAYS[0]]) if times[WAYS[0]] else None
    rows = []
    for way in (way for way in WAYS if times[way]):
        middle = median(times[way])
        ratio = f"{base / middle:.0f}" if base and way != WAYS[0] else "-"
        rows.append([way, f"{middle:.2f} s", ", ".join(f"{one:.2f}" for one in sorted(times[way])), ratio])
    how = (
        f"SIGKILL of one of two workers to the first step of both; after its fork a worker imports a module that takes "
        f"{SLOW:g} s; medians; the ratio is that of forkserver to it"
    )
    return [Table("warm workers", measured(kept, how), HEAD, rows, text=(0, 2))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both ways in turn; return 0."""
    parser = argparse.ArgumentParser(description="What warm workers save of a restart.")
    SERIES.add_options(parser)
    options = parser.parse_args(arguments)
    return SERIES.run(parser, options, [Key(way, turn) for turn in range(TURNS) for way in WAYS])


SERIES = Series(
    "Warm workers",
    "forkserver/warm_workers",
    Row,
    lambda key: measure(key, Limits()),
    tables,
    lambda one: f"{one.way}, turn {one.turn}: {one.seconds:.2f} s",
)

if __name__ == "__main__":
    sys.exit(main())
