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

from core.launchers import OURS, Job, Launcher
from core.processes import classify, processor_time
from core.report import RESULTS, save_table
from core.run import Run

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


def measure(workers: int, rate: float, blocks: int, paced: bool) -> tuple[list[Cost], float, int]:
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


def measure_job(workers: int, rate: float, groups: int, output: Path) -> None:
    """Measure jobs with everything on and off, and write `progress_job.json` and `progress_job.md`."""
    turns: list[JobTimes] = []
    for mode in TURNS * groups:
        turns.append(time_job(mode, workers, rate))
        print(turns[-1], file=sys.stderr, flush=True)
    rows = [[one.mode, f"{one.steps:.0f}", f"{100 * one.launcher:.3f} %", f"{100 * one.worker:.3f} %"] for one in turns]
    costs = [job_cost(turns[start : start + len(TURNS)], rate) for start in range(0, len(turns), len(TURNS))]
    rows += [cost.cells(f"difference of group {number}") for number, cost in enumerate(costs, start=1)]
    middle = JobCost(median(one.launcher for one in costs), median(one.step for one in costs))
    rows.append(middle.cells("median difference"))
    how = (
        f"{workers} workers that sleep until each step is due, {rate:g} a second; each job was measured for "
        f"{WINDOW:g} s after {SETTLE:g} s, in processor time. The targets are 0.5 % of a processor and 1 % of a step"
    )
    for row in rows:
        print(*row, sep=" | ")
    save_table(output / "progress_job.json", "The cost of watching a job", how, JOB_HEAD, rows, turns)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write `progress_cost.json` and `progress_cost.md`."""
    parser = argparse.ArgumentParser(description="What it costs to watch the progress of workers.")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--rate", type=float, default=RATE, help="steps a second of a worker (default: 1000)")
    parser.add_argument("--blocks", type=int, default=25, help="groups of four blocks (default: 25)")
    parser.add_argument("--paced", action="store_true", help="workers sleep until a step is due and do not compute")
    parser.add_argument("--job", type=int, metavar="N", help="instead, N groups of four whole jobs")
    parser.add_argument("--output", type=Path, default=RESULTS / "why", help="folder of the results")
    options = parser.parse_args(arguments)
    if min(options.workers, options.rate, options.blocks, options.job or 1) <= 0:
        parser.error("--workers, --rate, --blocks and --job must be above 0")
    if options.job:
        measure_job(options.workers, options.rate, options.job, options.output)
        return 0
    costs, read, steps = measure(options.workers, options.rate, options.blocks, options.paced)
    rows = [cost.cells() for cost in costs]
    kind = "of the clock, in which they sleep" if options.paced else "of their own processor time"
    how = (
        f"{options.workers} workers at {options.rate:g} steps a second {kind}, {options.blocks} "
        f"groups of four blocks of {BLOCK} steps; a read of all pages took the reader {1e6 * read:.0f} us, once a "
        f"second; the pages showed {steps} of {2 * options.workers * options.blocks * BLOCK} reports at the end"
    )
    for row in rows:
        print(*row, sep=" | ")
    print(how)
    name = "progress_paced.json" if options.paced else "progress_cost.json"
    save_table(options.output / name, "The cost of reporting progress", how, HEAD, rows, costs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
