"""What a report of progress costs the worker, as a share of its step. See `benchmarks/README.md`.

Workers on one machine make steps at a fixed rate: each computes for the time of a step. Of four blocks of steps the
second and the third report each step. The judged figure is the processor time of these two as a ratio to that of the
first and the fourth, so that a changing load affects both alike. A reader reads the pages meanwhile, once a second.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from core.report import RESULTS, save_table

from dlrover_run.progress.page import VARIABLE
from dlrover_run.progress.pages import ProgressPages

WORKERS = 8
RATE = 1_000.0
"""Steps a second of one worker."""

BLOCK = 200
"""Steps of a block: short beside the changes of a load."""

READ_INTERVAL = 1.0

WORKER = """
import sys, time
from dlrover_run.progress import page
from dlrover_run.progress.page import StepSource
work, block, blocks = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

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


def cost_of(worker: int, printed: str) -> Cost:
    """The cost from what a worker has printed: for each block whether it reported, 0 or 1, and its seconds."""
    times = [float(line.split()[1]) for line in printed.splitlines()]
    groups = zip(times[::4], times[1::4], times[2::4], times[3::4], strict=True)
    pairs = [(first + fourth, second + third) for first, second, third, fourth in groups]
    ratios = tuple(reporting / silent for silent, reporting in pairs)
    return Cost(worker, ratios, tuple((reporting - silent) / (2 * BLOCK) for silent, reporting in pairs))


def measure(workers: int, rate: float, blocks: int) -> tuple[list[Cost], float, int]:
    """The cost of each worker; the processor time of a read of all pages, in seconds; and the steps that were read."""
    pages = ProgressPages(workers)
    arguments = [str(1 / rate), str(BLOCK), str(blocks)]
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
    costs = [cost_of(number, process.communicate()[0]) for number, process in enumerate(running)]
    found = [pages.read(number) for number in range(workers)]
    pages.close()
    return costs, median(reads), sum(one.steps for one in found if one is not None)


HEAD = ("worker", "with reports / without", "smallest - greatest", "a report")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write `progress_cost.json` and `progress_cost.md`."""
    parser = argparse.ArgumentParser(description="What a report of progress costs, as a share of a step.")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--rate", type=float, default=RATE, help="steps a second of a worker (default: 1000)")
    parser.add_argument("--blocks", type=int, default=25, help="groups of four blocks (default: 25)")
    parser.add_argument("--output", type=Path, default=RESULTS / "why", help="folder of the results")
    options = parser.parse_args(arguments)
    if min(options.workers, options.rate, options.blocks) <= 0:
        parser.error("--workers, --rate and --blocks must be above 0")
    costs, read, steps = measure(options.workers, options.rate, options.blocks)
    rows = [cost.cells() for cost in costs]
    how = (
        f"{options.workers} workers at {options.rate:g} steps a second of their own processor time, {options.blocks} "
        f"groups of four blocks of {BLOCK} steps; a read of all pages took the reader {1e6 * read:.0f} us, once a "
        f"second; the pages showed {steps} of {2 * options.workers * options.blocks * BLOCK} reports at the end"
    )
    for row in rows:
        print(*row, sep=" | ")
    print(how)
    save_table(options.output / "progress_cost.json", "The cost of reporting progress", how, HEAD, rows, costs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
