"""Jobs that hang, and jobs that only seem to: who is named, where, after how long. See `benchmarks/README.md`.

Each run is a job of its own, which trains until a fault that is drawn from a seed. Every finished run is kept, so that
the matrix can be measured in pieces: a run that is kept is not repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# The reports of NCCL RAS are those of the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from core import faults
from core.faults import DATA_NETWORK, TwoNetworks
from core.launchers import OURS, Job, Launcher
from core.ratios import Lost
from core.run import NANOSECOND, Run
from core.series import Kept, Series
from device_lab.build import why_no_compiler
from device_lab.job import DeviceJob, device_job
from stall_matrix.kinds import (
    BY_NAME,
    CALMS,
    DEVICE,
    FAULTS,
    INNOCENTS,
    REPETITIONS,
    SHAPES,
    Fault,
    Key,
    keys,
)
from stall_matrix.report import tables
from stall_matrix.trial import Trial, outcome, trial_of

from dlrover_run.events.reader import NoEventLog, merged, read_logs
from dlrover_run.events.records import WorkerStalled
from dlrover_run.features.local_nodes import network
from dlrover_run.observe.processes import read_process
from dlrover_run.processes.tree import children_of

LIMIT = 100.0
"""Seconds after which a hang that was not reported counts as one that never will."""

START_TIMEOUT = 120.0
TRAINING = (8.0, 10.0)
"""The seconds of training before the fault are drawn between these, so that its distance from a sample varies."""

INNOCENT = 60.0
"""Seconds that an innocent pause takes."""

CALM = 900.0
"""Seconds for which a job without a fault trains. Another one has another rhythm, so that many short ones show more."""

AFTERWARDS = 10.0
"""Seconds of training after an innocent pause, in which a late report would come."""

END_OF_PAUSE = 600.0
"""Seconds by which an innocent pause may take longer than it should: it does not end in the middle of a compilation."""

WRITTEN = 0.3
WRITE_ATTEMPTS = 10
"""Seconds in which the launcher has written the events of the line that it has printed, and how often to wait for that
on a loaded machine."""

PRINTED = "no progress for "
EVERY_RANK = -1
INNOCENT_REPETITIONS, CALM_REPETITIONS = 2, 20
SIZES = (2, 4)
PORT = 29400


def start(key: Key, run: Run, nodes: TwoNetworks | None, options: Sequence[str], environment: dict[str, str]) -> None:
    """Start the launcher, or one on each of two nodes with half of the ranks."""
    launcher = Launcher("", OURS, ("--start-method=forkserver", "--preload=torch", *options), environment)
    script = BY_NAME[key.fault].script
    if nodes is None:
        launcher.start(run, Job(script, key.ranks))
        return
    run.environment["GLOO_SOCKET_IFNAME"] = DATA_NETWORK
    for number, node in enumerate(nodes.nodes):
        address, conf = network.node_address(number), f"is_host={int(number == 0)}"
        job = Job(script, key.ranks // 2, 0, 2, "2", network.node_address(0), PORT, address, conf)
        with node.entered():
            launcher.start(run, job)


def stalls_in(journal: Path) -> list[WorkerStalled]:
    """The stalls in the event logs of a run. Raises Lost if there is no log."""
    try:
        entries = list(merged(read_logs(journal)))
    except NoEventLog as error:
        raise Lost(str(error)) from None
    return [entry.event for entry in entries if isinstance(entry.event, WorkerStalled)]


def wait_for_event(run: Run, journal: Path, fault_at: float) -> None:
    """Wait until the launcher has written the event of the report that it has printed."""
    for _ in range(WRITE_ATTEMPTS):
        run.settle(WRITTEN)
        if any(event.mono >= fault_at for event in stalls_in(journal)):
            return


def hang_or_pause(key: Key) -> Trial:
    """Run one job. Raises Lost if it did not come to its fault, or to the end of an innocent one."""
    fault, draw = BY_NAME[key.fault], key.draw
    guilty, delay = draw.randrange(key.ranks), draw.uniform(*TRAINING)
    of_all = fault.at_once or fault.together
    faulty, delay = EVERY_RANK if of_all else guilty, 0.0 if fault.at_once else delay
    with contextlib.ExitStack() as setting:
        place = setting.enter_context(fault.place())
        nodes = setting.enter_context(faults.two_networks()) if fault.cuts else None
        run = setting.enter_context(Run())
        run.ends_by_itself = False
        journal = run.directory / "journal"
        environment = {
            "BENCHMARK_FAULT": f"{key.fault} {faulty} {delay} {key.pause} {place}",
            "BENCHMARK_GUILTY": str(guilty),
        }
        device: DeviceJob | None = None
        if key.shape == DEVICE:
            device = setting.enter_context(device_job(run.directory, key.ranks, key.device_options))
            environment.update(device.environment)
        start(key, run, nodes, ("--stall-action=report", f"--journal={journal}"), environment)
        trains = run.wait("step", key.ranks, START_TIMEOUT)
        starved, awaited, asked = 0.0, "", 0
        began = run.wait("fault", 1, START_TIMEOUT, only={guilty})[0]
        fault_at = began.at_ns * NANOSECOND
        if device is not None:
            asked = device.reports.asked
        printed, queued, watched_at = len(run.output), queued_seconds(run), time.monotonic()
        with contextlib.ExitStack() as harm:
            if nodes is not None or fault.outside is not None:
                fault_at = time.monotonic()
            if nodes is not None:
                nodes.cut(guilty // (key.ranks // 2))
            if fault.outside is not None:
                harm.enter_context(fault.outside(run, began.pid, place))
            if not fault.innocent:
                # A false report before it is none of this hang.
                found = run.wait_output(PRINTED, LIMIT, after=printed)
                starved = (queued_seconds(run) - queued) / (time.monotonic() - watched_at)
                if device is not None:
                    awaited = device.awaited(guilty)
                if found:
                    wait_for_event(run, journal, fault_at)
            elif fault.outside is not None:
                run.settle(key.pause)
        if fault.innocent:
            if fault.outside is None:
                run.wait("over", key.ranks if of_all else 1, key.pause + END_OF_PAUSE)
            run.settle(AFTERWARDS)
        ended = time.monotonic() if fault.innocent else fault_at
        events = stalls_in(journal)
    at = float("inf") if fault.innocent else fault_at
    watched = ended - max(report.at_ns for report in trains) * NANOSECOND
    return trial_of(key, guilty, at, events, watched, starved, awaited, asked)


def queued_seconds(run: Run) -> float:
    """For how long the agents of the run could have run and had no processor, the one that had the fewest."""
    agents = [one for launcher in run.launchers for one in children_of(launcher.pid)]
    return max((figures.queued for pid in agents if (figures := read_process(pid)) is not None), default=0.0)


def turns(text: str) -> range:
    """The numbers of runs: `20` for the first twenty, or `11:20`."""
    first, colon, last = text.partition(":")
    found = range(int(first), int(last) + 1) if colon else range(1, int(text) + 1)
    if not found or found[0] < 1:
        raise ValueError(text)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing; return 0."""
    parser = argparse.ArgumentParser(description=TITLE)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--innocent", action="store_true", help="the jobs that only seem to hang")
    which.add_argument("--calm", action="store_true", help="jobs that train for long, with ordinary pauses")
    parser.add_argument("--only", action="append", choices=BY_NAME, help="only this kind; may be repeated")
    parser.add_argument(
        "--repetitions", type=turns, help="runs of each kind and size, 20 or 11:20 (default: 20; innocent: 2)"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES, help="numbers of workers (default: 2 4)")
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        nargs="+",
        default=SHAPES,
        help="how workers wait: in gloo, or for a device as with NCCL (default: both)",
    )
    parser.add_argument(
        "--seconds", type=float, help="of an innocent pause (default: 60), or a calm job (default: 900)"
    )
    SERIES.add_options(parser)
    options = parser.parse_args(arguments)
    group: Sequence[Fault] = FAULTS
    repetitions, seconds, word = REPETITIONS, INNOCENT, "no hang"
    if options.innocent:
        repetitions, word, group = INNOCENT_REPETITIONS, "no innocent pause", INNOCENTS
    elif options.calm:
        repetitions, seconds, word, group = CALM_REPETITIONS, CALM, "no calm job", CALMS
    seconds = options.seconds or seconds
    if min(options.ranks) < 2 or seconds <= 0:
        parser.error("--ranks must be at least 2, --seconds above 0")
    names = options.only or [one.name for one in group]
    if others := {*names} - {one.name for one in group}:
        parser.error(f"{min(others)} is {word}")
    runs = options.repetitions or turns(str(repetitions))
    return SERIES.run(parser, options, keys(group, names, options.ranks, runs, seconds, options.shape))


@functools.cache
def why_absent(fault: str, shape: str) -> str | None:
    """Why a kind cannot be tried here; None if it can."""
    why = BY_NAME[fault].unavailable() or (why_no_compiler() if shape == DEVICE else None)
    return f"{fault}: {why}" if why else None


def absent(key: Key, kept: Sequence[Kept[Trial]]) -> str | None:
    """Why a run cannot be done here; None if it can."""
    return why_absent(key.fault, key.shape)


TITLE = "Jobs that hang, and jobs that only seem to"
SERIES = Series(TITLE, "stalls", Trial, hang_or_pause, tables, outcome, absent)

if __name__ == "__main__":
    sys.exit(main())
