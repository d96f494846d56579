"""The command: what is measured, within a limit of time, and written as each run ends."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from core import report, series
from core.processes import tree
from core.ratios import Lost
from core.report import RESULTS, RUNS
from core.series import Kept

from gpu import fixtures, hangs, kills, memory, pauses, picture
from gpu.plan import (
    HANGS,
    INNOCENTS,
    KILLS,
    MEMORY,
    NO_TIME,
    PAUSES,
    Key,
    Planned,
    Record,
    Steps,
    Times,
    plan_of,
    steps_of,
)
from gpu.setting import REHEARSAL, Clock, NoGpu, Setting, open_setting
from gpu.tables import summary

LIMIT, REHEARSAL_LIMIT = 360.0, 1800.0
"""Seconds that all runs together take at most, on a GPU and on a processor."""

PROCESSORS = 3
"""That a run of two ranks keeps busy. Runs that do not disturb each other share a machine with more."""

STEPS: Steps = (
    *([(KILLS, name)] for name in kills.RIVALS),
    [(HANGS, name) for name in hangs.CASES if name not in hangs.LONG and not hangs.CASES[name].pause[0]],
    *([(PAUSES, name)] for name in pauses.MEBIBYTES),
    *([(MEMORY, name)] for name in memory.CASES),
    [(INNOCENTS if hangs.CASES[name].pause[0] else HANGS, name) for name in hangs.LONG],
)
"""What is short and most wanted is done first, as a lent GPU may be gone at any time."""

TIMES: Mapping[str, Times] = {
    KILLS: (80.0, 30.0),
    HANGS: (80.0, 35.0),
    **{f"{HANGS}/{name}": (150.0, 115.0) for name, case in hangs.CASES.items() if case.limit == hangs.ALL_WAIT},
    PAUSES: (80.0, 25.0),
    MEMORY: (60.0, 25.0),
    INNOCENTS: (140.0, 50.0),
    f"{INNOCENTS}/long-kernel": (140.0, 75.0),
}
"""Of a run of each part, or case: its limit, and the seconds with which it is begun at the least."""

RUNNERS: Mapping[str, Callable[[Key, Setting, Clock, Path], Record]] = {
    KILLS: kills.run_case,
    HANGS: hangs.run_case,
    PAUSES: pauses.run_case,
    MEMORY: memory.run_case,
    INNOCENTS: hangs.run_case,
}


class Files:
    """The files of a measurement, which are whole after each run."""

    def __init__(self, output: Path | None, recorded: Path | None, rehearsal: bool, plan: Sequence[Planned]) -> None:
        name = "rehearsal" if rehearsal else "gpu"
        folder = output or RESULTS / "gpu"
        self._plan = plan
        self._rehearsal = REHEARSAL if rehearsal else ""
        self.results = folder / f"{name}.json"
        self._runs = (output or RUNS / "gpu") / f"{name}.jsonl"
        # What a rehearsal records is that of stand-ins, so it is no fixture.
        self.recorded = recorded or (RUNS / "gpu" if rehearsal and not output else folder) / "recorded"
        self._archive = folder / "recorded.tar.gz" if output else None

    def read(self, fresh: bool) -> list[Kept[Record]]:
        """The runs of before. With `fresh` those of the plan are done again. Raises ValueError."""
        again = {one.key for one in self._plan} if fresh else set()
        return [one for one in series.read(self._runs, Record) if one.run.key not in again]

    def write(self, kept: Sequence[Kept[Record]]) -> None:
        """Write the runs and what is made of them."""
        series.write(self._runs, kept)
        self.publish(kept)
        if self._archive is not None:
            fixtures.pack(self.recorded, self._archive)

    def publish(self, kept: Sequence[Kept[Record]]) -> None:
        """Write tables and picture again."""
        made = summary(kept, self._plan, self._rehearsal)
        report.write(self.results, made, report.markdown, series.draw_nothing)
        with contextlib.suppress(ModuleNotFoundError):
            picture.draw([one.run for one in kept], self.results.with_suffix(".png"), self._rehearsal)


def measure(planned: Planned, setting: Setting, deadline: float, recorded: Path) -> Record:
    """Do a run, or say why there is no result."""
    left = deadline - time.monotonic()
    if left < setting.scaled(planned.least, min(planned.least, 20.0)):
        return Record(planned.key, setting.device, left_out=NO_TIME)
    clock = Clock.of(min(left, setting.patience(planned.limit)))
    try:
        return RUNNERS[planned.key.part](planned.key, setting, clock, recorded)
    except (Lost, OSError, subprocess.SubprocessError, RuntimeError) as error:
        return Record(planned.key, setting.device, lost=f"lost: {error}")


def outcome(record: Record) -> str:
    """One line for the console."""
    figures = [f"{name} {value:.2f}" for name, value in record.figures.items() if value is not None]
    words = [f"{name}: {word}" for name, word in record.words.items() if word]
    return f"{record.key.part}/{record.key.case}: {record.why_empty or ', '.join([*figures, *words])}"


def measure_all(
    plan: Sequence[Planned], setting: Setting, deadline: float, files: Files, kept: list[Kept[Record]], lanes: int
) -> None:
    """Do the runs step by step, `lanes` of a step at a time, and write each as it ends."""
    machine = report.this_machine()
    for step in steps_of(plan):
        with _workers(lanes) as workers:
            futures = [workers.submit(measure, one, setting, deadline, files.recorded) for one in step]
            for future in as_completed(futures):
                record = future.result()
                print(outcome(record), file=sys.stderr, flush=True)
                if record.left_out == NO_TIME:
                    continue
                kept[:] = series.merge(kept, [Kept(record, machine)])
                files.write(kept)


@contextlib.contextmanager
def _workers(lanes: int) -> Iterator[ThreadPoolExecutor]:
    """Threads for the runs of a step. If the block is left early, the jobs are killed, so that the threads end."""
    workers = ThreadPoolExecutor(lanes)
    try:
        yield workers
    except BaseException:
        for pid in tree(os.getpid())[1:]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        raise
    finally:
        workers.shutdown(cancel_futures=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing within the limit; return 0, or 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu", description="What a GPU is needed for. See README.md.")
    parser.add_argument("--rehearse", action="store_true", help="no GPU: gloo and stand-ins, to see that it runs")
    parser.add_argument("--limit", type=float, help=f"seconds for all runs (default: {LIMIT:g})")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART[/CASE]", help="as hangs, or kills/torchrun")
    parser.add_argument("--repetitions", type=int, default=1, help="runs of each case (default: 1)")
    parser.add_argument("--lanes", type=int, help="runs at the same time, where they do not disturb each other")
    parser.add_argument("--fresh", action="store_true", help="measure again what is kept")
    parser.add_argument("--redraw", action="store_true", help="measure nothing; write tables and picture again")
    parser.add_argument("--output", type=Path, help="folder of results and runs (default: benchmarks/results/gpu)")
    parser.add_argument("--recorded", type=Path, help="folder of raw outputs (default: recorded, beside the results)")
    options = parser.parse_args(arguments)
    try:
        plan = plan_of(STEPS, TIMES, options.only, options.repetitions)
        files = Files(options.output, options.recorded, options.rehearse, plan)
        kept = files.read(options.fresh)
    except ValueError as error:
        parser.error(str(error))
    if options.redraw:
        files.publish(kept)
        return 0
    limit = options.limit or (REHEARSAL_LIMIT if options.rehearse else LIMIT)
    deadline = time.monotonic() + limit
    try:
        setting = open_setting(options.rehearse)
    except NoGpu as error:
        print(f"No GPU: {error}. --rehearse needs none.", file=sys.stderr)
        return 2
    done = {one.run.key for one in kept if not one.run.why_empty}
    missing = [one for one in plan if one.key not in done]
    lanes = options.lanes or max(1, (os.cpu_count() or 1) // PROCESSORS)
    print(f"{setting.device}; {len(missing)} of {len(plan)} runs, at most {limit:g} s", file=sys.stderr, flush=True)
    with _ended_by_sigterm():
        measure_all(missing, setting, deadline, files, kept, lanes)
    if importlib.util.find_spec("matplotlib") is None:
        print("No picture was drawn: there is no matplotlib. Install '.[benchmark]', then --redraw.", file=sys.stderr)
    print(files.results.with_suffix(".md").read_text() if kept else "nothing was measured")
    return 0


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit here. Otherwise it would leave the jobs behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
