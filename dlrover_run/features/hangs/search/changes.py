"""What each worker has done between two samples: whether it trained, made other progress, or used a processor. Pure.

Small amounts of data are doubtful: a helper thread of a library exchanges them in a worker that hangs too. So is new
memory, which a thread needs that copies for a device. What the main thread does meanwhile decides, between two samples:

| main thread | large exchange | small exchange | known keep-alive | small input or output | memory of other threads |
|---|---|---|---|---|---|
| still: it never had a processor | counts | - | - | - | counts |
| spins: it had or awaited one nearly all the time, and nothing else | counts | counts | - | - | - |
| runs now and then, or is not known | counts | counts | counts, unless it polls | counts | counts |

A main thread polls that runs also between the keep-alives, while that of another worker with keep-alives does not wake
for them: what it does is not their work.

A worker that waits for its device spins, and so does one that computes in one place: then stacks decide (`detector`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_run.observe.processes import WorkerFigures
from dlrover_run.observe.records import Evidence, Traffic

BUSY_SHARE = 0.1
"""A worker that uses or waits for a processor for this share of the time is busy. One that waits for a peer does
next to nothing of that."""

WORKING_FAULTS = 64
"""Page faults in a second of processor time with which a busy worker works: a thread that spins needs no new memory."""

MIN_WORKING_FAULTS = 8
"""The same between two samples, in which the worker had little of a processor."""

OUTPUT_BYTES = 1
"""Bytes read or written between two samples that are progress."""

HELPER_BYTES = 16 * 1024
"""The same in a second, while the main thread is still or spins: a thread that reads figures of the machine, or writes
to a log, shows no progress."""

SPIN_SHARE = 0.8
"""A main thread that has a processor, or waits for one, for this share of the time spins or computes."""

MIN_POLLS = 3
"""Samples in a row without any exchange in which a main thread ran now and then that polls."""

CHILD_SHARE = 0.05
"""A child that uses or waits for a processor for this share of the time works."""


class Main(enum.Enum):
    """What a main thread has done between two samples."""

    STILL = enum.auto()
    SPINS = enum.auto()
    RUNS = enum.auto()
    UNKNOWN = enum.auto()
    """The kernel does not count it, or a sample has no figures of the process."""


class Change(NamedTuple):
    """What a worker has done since the sample before: it was `busy` with a processor or waited for one, and with
    `computed` it had one. `measured` says whether that is known of its process too. `beats`: a known keep-alive of it
    has exchanged data, and no other connection."""

    trained: bool
    progress: bool
    busy: bool
    computed: bool
    measured: bool
    beats: bool = False


@dataclass
class Changes:
    """The samples of one round. `elsewhere`: it has workers on other nodes too."""

    elsewhere: bool = False
    _last: dict[int, Evidence] = field(default_factory=dict)
    _figures: dict[int, Evidence] = field(default_factory=dict)
    _steps: dict[int, int] = field(default_factory=dict)
    _polls: dict[int, int] = field(default_factory=dict)
    """By rank the samples in a row without an exchange in which its main thread ran."""

    @property
    def workers(self) -> int:
        """The number of workers of this node that were seen."""
        return len(self._last)

    def moved(self, samples: Sequence[Evidence]) -> list[Evidence]:
        """Those that have exchanged data since the sample before."""
        return [one for one in samples if one.rank in self._last and _has_exchanged(self._last[one.rank], one)]

    def count(self, samples: Sequence[Evidence], steps: Mapping[int, int]) -> bool:
        """Whether any worker has counted steps since the sample before."""
        return any(steps.get(one.rank, -1) > self._steps.get(one.rank, -1) for one in samples)

    def take(self, samples: Sequence[Evidence], steps: Mapping[int, int]) -> dict[int, Change]:
        """Take the evidence of all workers at one time and their steps; what each has done since the sample before."""
        mains = {one.rank: _main_thread(self._figures.get(one.rank), one) for one in samples}
        beating = [one.rank for one in samples if (before := self._last.get(one.rank)) and _beats(before, one)]
        wake = not any(mains[rank] in (Main.STILL, Main.SPINS) for rank in beating)
        for one in samples:
            if (before := self._last.get(one.rank)) is not None and before.traffic[:2] == one.traffic[:2]:
                self._note_poll(one.rank, mains[one.rank])
        return {one.rank: self._change(one, samples, steps.get(one.rank), mains[one.rank], wake) for one in samples}

    def _note_poll(self, rank: int, main: Main) -> None:
        if main is Main.RUNS:
            self._polls[rank] = self._polls.get(rank, 0) + 1
        elif main is Main.STILL:
            self._polls.pop(rank, None)

    def forget_figures(self) -> None:
        """The machine was frozen: the processor time of a freeze means nothing."""
        self._figures.clear()

    def _change(self, one: Evidence, samples: Sequence[Evidence], steps: int | None, main: Main, wake: bool) -> Change:
        """`wake`: of all workers with keep-alives since the sample before the main threads have run now and then."""
        before = self._last.get(one.rank)
        self._last[one.rank] = one
        known = self._figures.get(one.rank)
        if one.figures is None:
            self._figures.pop(one.rank, None)
        else:
            self._figures[one.rank] = one
        polls = not wake and self._polls.get(one.rank, 0) >= MIN_POLLS
        # A worker alone has connections that need not be part of its training: only its own steps are.
        beats = before is not None and _beats(before, one)
        exchanged = before is not None and _is_progress(before.traffic, one.traffic, main, known is not None)
        exchanged = exchanged and not (beats and polls)
        trained = exchanged and (len(samples) > 1 or self.elsewhere)
        if steps is not None and self._steps.get(one.rank) != steps:
            trained = trained or one.rank in self._steps
            self._steps[one.rank] = steps
        if known is None or known.figures is None or one.figures is None or one.at <= known.at:
            return Change(trained, trained or exchanged, busy=False, computed=False, measured=False, beats=beats)
        seconds = one.at - known.at
        own, earlier = one.figures.own, known.figures.own
        enough = OUTPUT_BYTES if main in (Main.RUNS, Main.UNKNOWN) else HELPER_BYTES * seconds
        moved = own.written - earlier.written >= enough or own.read - earlier.read >= enough
        busy = own.runs or own.ready - earlier.ready >= BUSY_SHARE * seconds
        computed = own.cpu - earlier.cpu >= BUSY_SHARE * seconds
        enough = max(MIN_WORKING_FAULTS, WORKING_FAULTS * min(seconds, own.cpu - earlier.cpu))
        works = busy and _new_memory(one.figures, known.figures, main) >= enough
        progress = trained or exchanged or moved or works or _child_works(one, known, seconds)
        return Change(trained, progress, busy, computed, measured=True, beats=beats)


def _has_exchanged(before: Evidence, one: Evidence) -> bool:
    """Whether it has exchanged more than heartbeats."""
    earlier, now = before.traffic, one.traffic
    return earlier[:2] != now[:2] if now.counted is None else earlier.counted != now.counted


def _beats(before: Evidence, one: Evidence) -> bool:
    """Whether it has exchanged heartbeats of known keep-alives and nothing else."""
    return before.traffic[:2] != one.traffic[:2] and not _has_exchanged(before, one)


def _main_thread(before: Evidence | None, one: Evidence) -> Main:
    if before is None or before.figures is None or one.figures is None or one.at <= before.at:
        return Main.UNKNOWN
    own, earlier = one.figures.own, before.figures.own
    if not own.turns:
        return Main.UNKNOWN
    if own.turns == earlier.turns and not own.runs:
        return Main.STILL
    if one.figures.never_waited(before.figures):
        return Main.SPINS
    ready = own.main - earlier.main + own.queued - earlier.queued
    return Main.SPINS if ready >= SPIN_SHARE * (one.at - before.at) else Main.RUNS


def _is_progress(before: Traffic, now: Traffic, main: Main, has_figures: bool) -> bool:
    """Whether what was exchanged since the sample before is progress. `has_figures`: both samples have those of the
    process."""
    if before[:2] == now[:2]:
        return False
    if now.carried is None or before.carried != now.carried:
        return True
    if before.counted != now.counted:
        return main is not Main.STILL
    return main is Main.RUNS or (main is Main.UNKNOWN and has_figures)


def _new_memory(now: WorkerFigures, before: WorkerFigures, main: Main) -> int:
    """The page faults between two samples. Those of a main thread that spins are its own: what other threads copy is
    no work that it waits for, as it would sleep then."""
    if main is Main.SPINS and now.main_faults is not None and before.main_faults is not None:
        return now.main_faults - before.main_faults
    return now.own.faults - before.own.faults


def _child_works(one: Evidence, known: Evidence, seconds: float) -> bool:
    assert one.figures is not None
    assert known.figures is not None
    before = {child.pid: child for child in known.figures.children}
    for child in one.figures.children:
        earlier = before.get(child.pid)
        if earlier is None:
            return True
        if child.written + child.read > earlier.written + earlier.read:
            return True
        if child.runs or child.ready - earlier.ready >= CHILD_SHARE * seconds:
            return True
    return False
