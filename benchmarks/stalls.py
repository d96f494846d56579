"""Jobs that hang, and jobs that only seem to: who is named, where, after how long. See `benchmarks/README.md`.

Each run is a job of its own, which trains until a fault that is drawn from a seed. Every finished run is kept, so that
the matrix can be measured in pieces: a run that is kept is not repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from core import faults
from core.faults import DATA_NETWORK, TwoNetworks, why_no_freezer, why_no_mount, why_no_own_disk
from core.kept import Series, Stored, percent, quantile
from core.launchers import OURS, Job, Launcher
from core.ratios import Lost
from core.report import Machine, table
from core.run import NANOSECOND, Run

from dlrover_run.coordination.reasons import render
from dlrover_run.events.reader import NoEventLog, merged, read_logs
from dlrover_run.events.records import WorkerStalled
from dlrover_run.evidence.processes import read_process
from dlrover_run.local_cluster import network
from dlrover_run.process_tree.tree import children_of
from dlrover_run.stall.guilt import GuiltCode

LIMIT = 60.0
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

STARVED = 0.5
"""The share of the time from which on the launcher counts as one that had no processor."""

ONE_REPORT = 0.5
"""Seconds between the first and the last event of one report."""

SCRIPT, CALM_SCRIPT = "stalling.py", "calm.py"
PRINTED = "no progress for "
EVERY_RANK = -1
REPETITIONS, INNOCENT_REPETITIONS, CALM_REPETITIONS = 20, 2, 20
SIZES = (2, 4)
PORT = 29400

NO_RANK, NO_REPORT = "no rank", "no report"

Outside = Callable[[Run, int, str], AbstractContextManager[None]]
"""What the benchmark does to a job: the run, the pid of the worker, and the place that the fault has prepared."""


@dataclass(frozen=True)
class Fault:
    """What happens to one worker. Either the worker does it itself (`workers/stalling.py`), or `outside` does.

    `functions` are those of the worker's script in which it hangs, none if it can write no stack. With `mutual`, two
    ranks wait for each other, and nothing says which of them is at fault. `place` is a folder or an address that the
    worker needs. `innocent`: it is no hang, and ends by itself, or at the end of `outside`. `at_once`: each rank does
    it, before its second step. `cuts`: the job has two nodes, and that of the rank loses the network in which the ranks
    exchange data, but not the one of the launchers. `max_turns` bounds the runs with each number of ranks.
    `unavailable` returns why it cannot be tried here, None if it can.
    """

    name: str
    title: str
    functions: tuple[str, ...] = ()
    mutual: bool = False
    innocent: bool = False
    at_once: bool = False
    cuts: bool = False
    max_turns: int = REPETITIONS
    outside: Outside | None = None
    place: Callable[[], AbstractContextManager[str]] = lambda: nullcontext("-")
    script: str = SCRIPT
    unavailable: Callable[[], str | None] = lambda: None


FAULTS = (
    Fault("stopped", "stopped by SIGSTOP"),
    Fault("sleep", "sleeps", ("sleep",)),
    Fault("spin", "spins in Python", ("spin",)),
    Fault("spin-in-c", "spins in C and holds the lock of the interpreter", ("spin_in_c",)),
    Fault("lost-loader", "waits for a process that loads data and was killed", ("lost_loader",)),
    Fault("lock", "waits for a lock that it holds", ("lock",)),
    Fault(
        "frozen",
        "in state D: frozen by its control group",
        outside=lambda run, pid, place: faults.frozen([pid]),
        unavailable=why_no_freezer,
    ),
    Fault(
        "blocked-disk",
        "in state D: writes to a file system that is frozen",
        place=faults.own_disk,
        outside=lambda run, pid, place: faults.blocked(place),
        unavailable=why_no_own_disk,
    ),
    Fault("mismatch", "calls another collective than the others", ("mismatch", "step"), mutual=True),
    Fault("left", "has left the loop, and waits in a barrier", ("left", "step"), mutual=True),
    Fault("cut", "receives nothing from the network", ("step",), mutual=True),
    Fault(
        "cut-node",
        "on one of two nodes, whose network is cut",
        ("step",),
        mutual=True,
        cuts=True,
        unavailable=network.why_not,
    ),
    Fault(
        "full-disk",
        "tries again and again to write to a full disk",
        ("full_disk",),
        place=faults.small_disk,
        unavailable=why_no_mount,
    ),
    Fault("storm", "waits for 300 threads that spin", ("storm",)),
)

INNOCENTS = (
    Fault("checkpoint", "one rank writes a checkpoint", innocent=True),
    Fault("evaluation", "one rank evaluates", innocent=True),
    Fault("warm-up", "all ranks compile before their second step", innocent=True, at_once=True),
    Fault("compilation", "one rank compiles again", innocent=True),
    Fault("download", "one rank downloads data from a slow server", innocent=True, place=faults.slow_server),
    Fault(
        "debugger",
        "one rank is in pdb",
        innocent=True,
        place=faults.console,
        outside=lambda run, pid, place: faults.continuing(place),
    ),
    Fault(
        "traced",
        "one rank was stopped by a debugger from outside",
        innocent=True,
        outside=lambda run, pid, place: faults.traced(pid),
    ),
    Fault(
        "machine",
        "the whole job is frozen, and thawed again",
        innocent=True,
        outside=lambda run, pid, place: faults.frozen([process.pid for process in run.processes()]),
        unavailable=why_no_freezer,
    ),
    Fault(
        "suspended",
        "the whole job is stopped by SIGSTOP, and continued",
        innocent=True,
        outside=lambda run, pid, place: faults.stopped([process.pid for process in run.processes()]),
    ),
)

CALMS = (Fault("calm", "trains, with pauses drawn at random", innocent=True, max_turns=1000, script=CALM_SCRIPT),)

BY_NAME = {fault.name: fault for fault in (*FAULTS, *INNOCENTS, *CALMS)}


class Key(NamedTuple):
    """One run of the matrix. `pause` is the seconds of an innocent one, 0 of a hang."""

    fault: str
    ranks: int
    turn: int
    pause: float = 0.0

    @property
    def draw(self) -> random.Random:
        """The random numbers of this run."""
        return random.Random(f"{self.fault} {self.ranks} {self.turn}")


@dataclass(frozen=True)
class Trial:
    """What came of one run. `seconds` from the fault to the report are None if there was none, `code` is why the
    `named` ranks were named, `function` where the first of them was found. `wrong_reports` came when nothing was
    wrong: before the fault, or of an innocent job; that lasted for `watched` seconds. `wrong` has their lines.
    `starved` is the share of the time from the fault to the report in which the launcher could have run and had no
    processor."""

    fault: str
    ranks: int
    turn: int
    pause: float
    guilty: int
    seconds: float | None
    named: tuple[int, ...]
    code: str
    function: str
    wrong_reports: int
    watched: float
    load: float
    commit: str
    wrong: tuple[str, ...] = ()
    starved: float = 0.0

    @property
    def key(self) -> Key:
        return Key(self.fault, self.ranks, self.turn, self.pause)

    @property
    def reported(self) -> str:
        """Why the rank was named, or that none was."""
        return NO_REPORT if self.seconds is None else self.code or NO_RANK

    @property
    def right_rank(self) -> bool:
        """Whether the guilty rank was named, and no other; of two ranks that wait for each other both may be, and of
        two nodes without a network between them the ranks of either."""
        fault = BY_NAME[self.fault]
        if fault.cuts:
            return bool(self.named)
        both = fault.mutual and self.ranks == 2
        return set(self.named) == {self.guilty} or (both and len(self.named) == 2)

    @property
    def right_line(self) -> bool:
        """Whether the line is one of the function in which the guilty rank hangs."""
        return self.right_rank and self.function in BY_NAME[self.fault].functions


def trial_of(
    key: Key,
    guilty: int,
    fault_at: float,
    events: Sequence[WorkerStalled],
    watched: float,
    load: float = 0.0,
    commit: str = "",
    starved: float = 0.0,
) -> Trial:
    """The outcome of a run from the stalls in its event log; `fault_at` is infinite if nothing was wrong. Pure."""
    wrong = [event for event in events if event.mono < fault_at]
    after = [event for event in events if event.mono >= fault_at]
    first = [event for event in after if event.mono <= after[0].mono + ONE_REPORT]
    reasons = next((event.reasons for event in first if event.guilty), ())
    place: Mapping[str, object] = next((one.params for one in reasons if GuiltCode.PLACE.within((one,))), {})
    here = str(place.get("file", "")).endswith(f"/{SCRIPT}")
    lines = {round(event.since, 3): "" for event in wrong}
    for event in wrong:
        if event.guilty:
            lines[round(event.since, 3)] = f"rank {event.rank} {render(event.reasons)}"
    return Trial(
        *key,
        guilty=guilty,
        seconds=first[0].mono - fault_at if first else None,
        named=tuple(sorted(event.rank for event in first if event.guilty)),
        code=reasons[0].code.removeprefix("stall.") if reasons else "",
        function=str(place["function"]) if here else "",
        wrong_reports=len(lines),
        watched=watched,
        load=load,
        commit=commit,
        wrong=tuple(lines.values()),
        starved=round(starved, 2),
    )


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


def hang_or_pause(key: Key, machine: Machine) -> Trial:
    """Run one job. Raises Lost if it did not come to its fault, or to the end of an innocent one."""
    fault, draw = BY_NAME[key.fault], key.draw
    guilty, delay = draw.randrange(key.ranks), draw.uniform(*TRAINING)
    faulty, delay = (EVERY_RANK, 0.0) if fault.at_once else (guilty, delay)
    with contextlib.ExitStack() as setting:
        place = setting.enter_context(fault.place())
        nodes = setting.enter_context(faults.two_networks()) if fault.cuts else None
        run = setting.enter_context(Run())
        run.ends_by_itself = False
        journal = run.directory / "journal"
        environment = {"BENCHMARK_FAULT": f"{key.fault} {faulty} {delay} {key.pause} {place}"}
        start(key, run, nodes, ("--stall-action=report", f"--journal={journal}"), environment)
        trains = run.wait("step", key.ranks, START_TIMEOUT)
        starved = 0.0
        began = run.wait("fault", 1, START_TIMEOUT, only={guilty})[0]
        fault_at = began.at_ns * NANOSECOND
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
                if found:
                    wait_for_event(run, journal, fault_at)
            elif fault.outside is not None:
                run.settle(key.pause)
        if fault.innocent:
            if fault.outside is None:
                run.wait("over", key.ranks if fault.at_once else 1, key.pause + END_OF_PAUSE)
            run.settle(AFTERWARDS)
        ended = time.monotonic() if fault.innocent else fault_at
        events = stalls_in(journal)
    at = float("inf") if fault.innocent else fault_at
    watched = ended - max(report.at_ns for report in trains) * NANOSECOND
    return trial_of(key, guilty, at, events, watched, machine.load_average[0], machine.commit, starved)


def queued_seconds(run: Run) -> float:
    """For how long the agents of the run could have run and had no processor, the one that had the fewest."""
    agents = [one for launcher in run.launchers for one in children_of(launcher.pid)]
    return max((figures.queued for pid in agents if (figures := read_process(pid)) is not None), default=0.0)


def keys(kinds: Sequence[Fault], names: Collection[str], sizes: Sequence[int], turns: range, pause: float) -> list[Key]:
    """All runs of these kinds, in an order in which each part of the matrix is even over the kinds."""
    return [
        Key(one.name, ranks, turn, pause if one.innocent else 0.0)
        for turn in turns
        for one in kinds
        for ranks in sizes
        if one.name in names and turn <= one.max_turns and not (one.cuts and ranks % 2)
    ]


HANGS_HEAD = (
    *("ranks", "the guilty rank", "runs", "reported", "median", "95 %", "greatest"),
    *("right rank", "another rank", "no rank", "right line", "before the fault"),
)
INNOCENTS_HEAD = ("ranks", "what happens", "for", "runs", "runs with a report")
REASONS_HEAD = ("the guilty rank", "runs")
RANKS_HEAD = ("ranks", "guilty", "runs")


def hang_cells(title: str, ranks: str, trials: Sequence[Trial]) -> list[str]:
    """One row of the table of hangs."""
    reported = [one for one in trials if one.seconds is not None]
    times = [one.seconds for one in reported if one.seconds is not None]
    figures = [median(times), quantile(times, 0.95), max(times)] if times else []
    with_line = [one for one in trials if BY_NAME[one.fault].functions]
    return [
        ranks,
        title,
        str(len(trials)),
        percent(len(reported), len(trials)),
        *([f"{figure:.1f} s" for figure in figures] or ["-"] * 3),
        percent(sum(one.right_rank for one in trials), len(trials)),
        percent(sum(bool(one.named) and not one.right_rank for one in trials), len(trials)),
        percent(sum(not one.named for one in trials), len(trials)),
        percent(sum(one.right_line for one in with_line), len(with_line)),
        str(sum(one.wrong_reports for one in trials)),
    ]


def reason_rows(hangs: Sequence[Trial], codes: Sequence[str]) -> list[list[str]]:
    """The confusion matrix: of each kind of hang, how often each reason was reported."""
    return [
        [fault.title, str(len(own)), *(str(sum(one.reported == code for one in own) or "") for code in codes)]
        for fault in FAULTS
        if (own := [one for one in hangs if one.fault == fault.name])
    ]


def rank_rows(hangs: Sequence[Trial], sizes: Sequence[int]) -> list[list[str]]:
    """The confusion matrix of ranks: of each guilty rank, how often each rank was named, several, or none."""
    rows = []
    for size in sizes:
        for guilty in range(size):
            own = [one for one in hangs if (one.ranks, one.guilty) == (size, guilty)]
            named = Counter(one.named for one in own)
            several = sum(number for ranks, number in named.items() if len(ranks) > 1)
            counts = [*(named[rank,] for rank in range(max(sizes))), several, named[()]]
            if own:
                rows.append([str(size), str(guilty), str(len(own)), *(str(count or "") for count in counts)])
    return rows


def markdown(stored: Stored[Trial]) -> str:
    """All tables."""
    hangs = [one for one in stored.runs if not BY_NAME[one.fault].innocent]
    innocent = [one for one in stored.runs if BY_NAME[one.fault].innocent]
    sizes = sorted({one.ranks for one in stored.runs})
    groups = [
        (fault, size, [one for one in hangs if (one.fault, one.ranks) == (fault.name, size)])
        for fault in FAULTS
        for size in sizes
    ]
    rows = [hang_cells(fault.title, str(size), own) for fault, size, own in groups if own]
    rows += [hang_cells("all", "", hangs)] if hangs else []
    fed = [one for one in hangs if one.starved <= STARVED]
    rows += [hang_cells("all whose launcher had a processor", "", fed)] if len(fed) < len(hangs) else []
    found = {one.reported for one in hangs}
    codes = [*sorted(found - {NO_RANK, NO_REPORT}), NO_RANK, NO_REPORT]
    pauses = [
        [str(size), fault.title, f"{pause:g} s", str(len(own)), str(sum(one.wrong_reports > 0 for one in own))]
        for fault in (*INNOCENTS, *CALMS)
        for size in sizes
        for pause in sorted({one.pause for one in innocent if one.fault == fault.name})
        if (own := [one for one in innocent if (one.fault, one.ranks, one.pause) == (fault.name, size, pause)])
    ]
    watched, wrong = sum(one.watched for one in stored.runs), sum(one.wrong_reports for one in stored.runs)
    commits = ", ".join(dict.fromkeys(one.commit for one in stored.runs))
    loads = [one.load for one in stored.runs]
    measured = f"load {min(loads, default=0):.1f} to {max(loads, default=0):.1f}; commits of the runs: {commits}"
    named = [f"rank {rank} named" for rank in range(max(sizes, default=0))]
    lines = ["# Jobs that hang, and jobs that only seem to", ""]
    lines += ["`benchmarks/README.md` says what is measured and how.", "", f"{stored.machine}; {measured}.", ""]
    lines += [f"Jobs without a fault, or before it, were watched for {watched:.0f} s ({watched / 3600:.2f} hours): "]
    lines[-1] += f"{wrong} false reports."
    lines += ["", "## Hangs", "", *table(HANGS_HEAD, rows, (1,)), ""]
    lines += ["## Why the rank was named", "", *table((*REASONS_HEAD, *codes), reason_rows(hangs, codes), (0,)), ""]
    lines += ["## The ranks that were named", ""]
    lines += [*table((*RANKS_HEAD, *named, "several", "none"), rank_rows(hangs, sizes), ()), ""]
    lines += ["## Innocent pauses", "", *table(INNOCENTS_HEAD, pauses, (1,)), ""]
    return "\n".join(lines)


def outcome(trial: Trial) -> str:
    """One line for the console."""
    named = " ".join(map(str, trial.named)) or "none"
    at = "no report" if trial.seconds is None else f"{trial.seconds:.1f} s, rank {named}, {trial.code} {trial.function}"
    wrong = "".join(f"; wrong report: {line or NO_RANK}" for line in trial.wrong)
    return f"{trial.fault} {trial.ranks} {trial.turn}: guilty {trial.guilty}: {at}{wrong}"


def turns(text: str) -> range:
    """The numbers of runs: `20` for the first twenty, or `11:20`."""
    first, colon, last = text.partition(":")
    found = range(int(first), int(last) + 1) if colon else range(1, int(text) + 1)
    if not found or found[0] < 1:
        raise ValueError(text)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, and write `stalls.json` and `stalls.md`."""
    parser = argparse.ArgumentParser(description="Jobs that hang, and jobs that only seem to.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--innocent", action="store_true", help="the jobs that only seem to hang")
    which.add_argument("--calm", action="store_true", help="jobs that train for long, with ordinary pauses")
    parser.add_argument("--only", action="append", choices=BY_NAME, help="only this kind; may be repeated")
    parser.add_argument(
        "--repetitions", type=turns, help="runs of each kind and size, 20 or 11:20 (default: 20; innocent: 2)"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES, help="numbers of workers (default: 2 4)")
    parser.add_argument(
        "--seconds", type=float, help="of an innocent pause (default: 60), or a calm job (default: 900)"
    )
    Series.add_options(parser)
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
    return SERIES.run(
        parser, options, keys(group, names, options.ranks, options.repetitions or turns(str(repetitions)), seconds)
    )


@functools.cache
def why_absent(fault: str) -> str | None:
    """Why a kind cannot be tried here; None if it can."""
    why = BY_NAME[fault].unavailable()
    return f"{fault}: {why}" if why else None


SERIES = Series("stalls.json", Trial, hang_or_pause, markdown, outcome, lambda key: why_absent(key.fault))

if __name__ == "__main__":
    sys.exit(main())
