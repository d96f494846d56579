"""What it costs to watch the progress of workers, in processor time. See `benchmarks/README.md`.

Workers on one machine make steps at a fixed rate. Each computes for the time of a step or, with `--paced`, sleeps until
the next one is due. Of four blocks of steps the second and the third report each step. The judged figure is the
processor time that these two take more than the first and the fourth, as a share of their steps, so that a changing
load affects both alike. A reader reads the pages meanwhile, once a second.

With `--job` they are the workers of a whole job, of which four in turn have everything off, on, on, off: the event log,
the watch for stalls, the reports. Then the processor time of the launcher's processes is measured too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from core.launchers import OURS, Job, Launcher
from core.processes import classify, processor_time
from core.report import Table
from core.run import Run
from core.series import Kept, Series, measured

from dlrover_run.observe.page import VARIABLE
from dlrover_run.observe.pages import ProgressPages

WORKERS = 8
RATE = 1_000.0
"""Steps a second of one worker."""

BLOCK = 200
"""Steps of a block: short beside the changes of a load."""

READ_INTERVAL = 1.0

SETTLE = 5.0
WINDOW = 20.0
"""Seconds for which a job runs before it is measured, and while it is."""

START_TIMEOUT = 120.0

EVERYTHING = {
    "off": ("--stall-action=off", "--journal=/dev/null"),
    "on": ("--stall-action=report", "--journal=journal"),
}

TURNS = ("off", "on", "on", "off")

JOB, PACED, COMPUTING = "job", "paced", "computing"
TITLES = {
    JOB: "The cost of watching a job",
    PACED: "The cost of reporting progress, steps that sleep",
    COMPUTING: "The cost of reporting progress, steps that compute",
}

WORKER = """
import sys, time
from dlrover_run.observe import page
from dlrover_run.observe.page import StepSource
work, block, blocks, paced = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
due = time.monotonic()

def spin(rounds):
    for _ in range(rounds):
        pass

# How many rounds of an empty loop are a step, on this processor.
rounds, began = 100_000, time.process_time()
spin(rounds)
rounds = int(rounds * work / (time.process_time() - began))
for number in range(4 * blocks):
    reports = number % 4 in (1, 2)
    began = time.process_time()
    for _ in range(block):
        if paced:
            due = max(due + work, time.monotonic() - 0.05)
            time.sleep(max(0.0, due - time.monotonic()))
        else:
            spin(rounds)
        if reports:
            page.add(StepSource.REPORT, 1, 32, 0.0)
    print(int(reports), time.process_time() - began, flush=True)
"""


@dataclass(frozen=True)
class Cost:
    """The ratios of one worker's groups of four blocks, and the seconds of processor time of one report in each."""

    worker: int
    ratios: tuple[float, ...]
    seconds: tuple[float, ...]

    def cells(self) -> list[str]:
        """Its row in the table."""
        spread = f"{min(self.ratios):.4f} - {max(self.ratios):.4f}"
        return [str(self.worker), f"{median(self.ratios):.4f}", spread, f"{1e6 * median(self.seconds):.2f} us"]


def cost_of(worker: int, printed: str, step: float = 0.0) -> Cost:
    """The cost from what a worker has printed: for each block whether it reported, 0 or 1, and its seconds. `step` is
    how long a step takes if it is not the processor time of one without a report."""
    times = [float(line.split()[1]) for line in printed.splitlines()]
    groups = zip(times[::4], times[1::4], times[2::4], times[3::4], strict=True)
    pairs = [(first + fourth, second + third) for first, second, third, fourth in groups]
    ratios = tuple(1 + (reporting - silent) / (2 * BLOCK * step or silent) for silent, reporting in pairs)
    return Cost(worker, ratios, tuple((reporting - silent) / (2 * BLOCK) for silent, reporting in pairs))


class Key(NamedTuple):
    """One measurement: of workers at a rate. `size` is the number of blocks, and `group` one of jobs."""

    kind: str
    workers: int
    rate: float
    size: int
    group: int = 1


@dataclass(frozen=True)
class Watched:
    """What came of it: the cost of each worker, the seconds of processor time of a read of all pages, and the steps
    that were read; or the turns of a group of jobs."""

    key: Key
    costs: Sequence[Cost] = ()
    read: float = 0.0
    steps: int = 0
    turns: Sequence[JobTimes] = ()


def measure(key: Key) -> Watched:
    """Measure workers, or a group of jobs. Raises Lost."""
    if key.kind == JOB:
        return Watched(key, turns=[time_job(mode, key.workers, key.rate) for mode in TURNS])
    return Watched(key, *measure_workers(key.workers, key.rate, key.size, key.kind == PACED))


def measure_workers(workers: int, rate: float, blocks: int, paced: bool) -> tuple[list[Cost], float, int]:
    """The cost of each worker; the processor time of a read of all pages, in seconds; and the steps that were read."""
    pages = ProgressPages(workers)
    arguments = [str(1 / rate), str(BLOCK), str(blocks), str(int(paced))]
    command = [sys.executable, "-c", WORKER, *arguments]
    environments = ({**os.environ, VARIABLE: pages.path(number)} for number in range(workers))
    running = [subprocess.Popen(command, env=each, stdout=subprocess.PIPE, text=True) for each in environments]
    reads: list[float] = []
    while any(process.poll() is None for process in running):
        began = time.process_time()
        for number in range(workers):
            pages.read(number)
        reads.append(time.process_time() - began)
        time.sleep(READ_INTERVAL)
    step = 1 / rate if paced else 0.0
    costs = [cost_of(number, process.communicate()[0], step) for number, process in enumerate(running)]
    found = [pages.read(number) for number in range(workers)]
    pages.close()
    return costs, median(reads), sum(one.steps for one in found if one is not None)


@dataclass(frozen=True)
class JobTimes:
    """Seconds of processor time that the launcher's processes, and each worker on average, took in a second of a
    job. `steps` is how many steps a worker did in a second."""

    mode: str
    launcher: float
    worker: float
    steps: float


@dataclass(frozen=True)
class JobCost:
    """What a job takes more with everything on, from four turns: the launcher's share of a processor, and a worker's
    share of a step of `rate` a second."""

    launcher: float
    step: float

    def cells(self, what: str) -> list[str]:
        return [what, "", f"{100 * self.launcher:.3f} %", f"{100 * self.step:.3f} %"]


def job_cost(turns: Sequence[JobTimes], rate: float) -> JobCost:
    """The cost from the four turns of a group. The share is that of a step of the rate that was asked for, also where
    the workers have not reached it."""

    def cost(figure: Callable[[JobTimes], float]) -> float:
        on, off = (fmean(figure(one) for one in turns if one.mode == mode) for mode in ("on", "off"))
        return on - off

    return JobCost(cost(lambda one: one.launcher), cost(lambda one: one.worker / one.steps) * rate)


def time_job(mode: str, workers: int, rate: float) -> JobTimes:
    """One turn of a job. Raises Lost if it ends early."""
    with Run() as run:
        run.ends_by_itself = False
        environment = {"BENCHMARK_RATE": str(rate), "BENCHMARK_COUNTS": str(int(mode == "on"))}
        Launcher("", OURS, EVERYTHING[mode], environment).start(run, Job("counting.py", workers))
        pids = [one.pid for one in run.wait("started", workers, START_TIMEOUT)]
        run.settle(SETTLE)
        roles = classify(run.processes(), pids)
        launcher = [pid for pid, role in roles.items() if role != "worker"]

        def times() -> tuple[float, float, float]:
            return time.monotonic(), sum(map(processor_time, launcher)), sum(map(processor_time, pids))

        before = times()
        run.settle(WINDOW)
        seconds, of_launcher, of_workers = (late - early for late, early in zip(times(), before, strict=True))
        steps = [read_count(run.directory, pid) for pid in pids]
    return JobTimes(mode, of_launcher / seconds, of_workers / seconds / workers, sum(steps) / len(steps))


def read_count(directory: Path, pid: int) -> float:
    """The steps a second that a worker has noted last."""
    lines = (directory / f"rate-{pid}").read_text().splitlines()
    return float(lines[-1]) if lines else 0.0


HEAD = ("worker", "with reports / without", "smallest - greatest", "a report")
JOB_HEAD = ("job", "steps a second of a worker", "the launcher, of a processor", "a worker, of a step")


def watched_table(one: Kept[Watched]) -> Table:
    """The table of workers."""
    run, key = one.run, one.run.key
    kind = "of the clock, in which they sleep" if key.kind == PACED else "of their own processor time"
    how = (
        f"{key.workers} workers at {key.rate:g} steps a second {kind}, {key.size} "
        f"groups of four blocks of {BLOCK} steps; a read of all pages took the reader {1e6 * run.read:.0f} us, once a "
        f"second; the pages showed {run.steps} of {2 * key.workers * key.size * BLOCK} reports at the end"
    )
    name = f"{key.kind}, {key.workers} workers at {key.rate:g}"
    return Table(name, measured([one], how), HEAD, [each.cells() for each in run.costs], TITLES[key.kind], text=(1,))


def job_table(groups: Sequence[Kept[Watched]]) -> Table:
    """The table of jobs with everything on and off, of the same workers."""
    key = groups[0].run.key
    turns = [each for one in groups for each in one.run.turns]
    rows = [[one.mode, f"{one.steps:.0f}", f"{100 * one.launcher:.3f} %", f"{100 * one.worker:.3f} %"] for one in turns]
    costs = [job_cost(one.run.turns, key.rate) for one in groups]
    rows += [cost.cells(f"difference of group {number}") for number, cost in enumerate(costs, start=1)]
    middle = JobCost(median(one.launcher for one in costs), median(one.step for one in costs))
    rows.append(middle.cells("median difference"))
    how = (
        f"{key.workers} workers that sleep until each step is due, {key.rate:g} a second; each job was measured for "
        f"{WINDOW:g} s after {SETTLE:g} s, in processor time. The targets are 0.5 % of a processor and 1 % of a step"
    )
    return Table(f"{JOB}, {key.workers} workers at {key.rate:g}", measured(groups, how), JOB_HEAD, rows, TITLES[JOB])


def tables(kept: Sequence[Kept[Watched]]) -> list[Table]:
    """All tables."""
    jobs = [one for one in kept if one.run.key.kind == JOB]
    settings = dict.fromkeys((one.run.key.workers, one.run.key.rate) for one in jobs)
    groups = [[one for one in jobs if (one.run.key.workers, one.run.key.rate) == setting] for setting in settings]
    return [*(job_table(group) for group in groups), *(watched_table(one) for one in kept if one.run.key.kind != JOB)]


def line(one: Watched) -> str:
    """One measurement for the console."""
    if one.key.kind == JOB:
        return " | ".join(job_cost(one.turns, one.key.rate).cells(f"difference of group {one.key.group}"))
    return "\n".join(" | ".join(cost.cells()) for cost in one.costs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line says; return 0."""
    parser = argparse.ArgumentParser(description="What it costs to watch the progress of workers.")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--rate", type=float, default=RATE, help="steps a second of a worker (default: 1000)")
    parser.add_argument("--blocks", type=int, default=25, help="groups of four blocks (default: 25)")
    parser.add_argument("--paced", action="store_true", help="workers sleep until a step is due and do not compute")
    parser.add_argument("--job", type=int, metavar="N", help="instead, N groups of four whole jobs")
    SERIES.add_options(parser)
    options = parser.parse_args(arguments)
    if min(options.workers, options.rate, options.blocks, options.job or 1) <= 0:
        parser.error("--workers, --rate, --blocks and --job must be above 0")
    if options.job:
        wanted = [Key(JOB, options.workers, options.rate, 0, group) for group in range(1, options.job + 1)]
    else:
        wanted = [Key(PACED if options.paced else COMPUTING, options.workers, options.rate, options.blocks)]
    return SERIES.run(parser, options, wanted)


SERIES = Series("What it costs to watch the progress of workers", "why/progress_cost", Watched, measure, tables, line)

if __name__ == "__main__":
    sys.exit(main())
