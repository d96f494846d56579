"""Watches the workers of one round on this node, or the TensorFlow tasks: takes samples, asks the detector, and looks
closely at workers that it finds quiet.

It is a consumer of the agent's `Tick`, and lives with its round: a report about an earlier round could only be wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from random import uniform
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from dlrover_run.features.hangs.collectives.positions import Position
from dlrover_run.features.hangs.node.diagnosis import Diagnosis, Quiet
from dlrover_run.features.hangs.node.watch_health import RETRY_INTERVAL, WatchHealth
from dlrover_run.features.hangs.search.detector import AskStacks, Decision, Resumed, StallCode, Stalled
from dlrover_run.features.hangs.search.outside import LearnedPauses
from dlrover_run.features.hangs.search.spin import PROBES, moves
from dlrover_run.features.hangs.search.suspects import (
    DeviceUse,
    Look,
    Suspect,
    describe_worker,
    has_moved,
    hold_unproven,
)
from dlrover_run.observe.records import Evidence
from dlrover_run.observe.sample import AdaptiveSampler, Sampling
from dlrover_run.stacks.stack import Stack
from dlrover_run.stacks.wait import Wait

TRAINING_INTERVAL = 1.0
"""Seconds between two samples while the workers exchange data. One takes some 2 ms for 8 workers."""

QUIET_INTERVAL = 0.5
"""Seconds between two samples while they do not, and until their rhythm is known: pauses that are measured more often
are learned earlier."""


BURST = PROBES // 3
"""Stacks of a busy worker that are read, one after the other, after a sample, unless fewer show that it works."""

LOOKS = 3
"""Stacks of each worker that are read once it makes no progress."""

SILENT_PROBES = PROBES // 6
"""Stacks in one place for which it counts that a worker has none."""

VARIATION = 0.25
"""The part of an interval by which it varies: samples at the same moment of each step would show nothing else."""


class Stacks(Protocol):
    """What reads stacks, by rank: `stacks.read.RoundStacks`."""

    async def read(
        self,
        ranks: Iterable[int],
        *,
        main: bool = False,
        times: int = 1,
        enough: Callable[[list[Stack]], bool] | None = None,
    ) -> Mapping[int, Sequence[Stack]]: ...


async def _no_positions() -> Mapping[int, tuple[Position, ...]]:
    return {}


async def _no_devices() -> Mapping[int, DeviceUse]:
    return {}


class Sources(NamedTuple):
    """What the watch reads of the workers: samples, stacks once a sample leaves a doubt, the steps that they have
    reported, by rank, and once none makes progress what their main threads wait for, where each worker is in its
    collectives, and how much it uses its device."""

    sampling: Sampling
    stacks: Stacks
    steps: Callable[[], Mapping[int, int]] = dict
    waits: Callable[[], Mapping[int, Wait]] = dict
    positions: Callable[[], Awaitable[Mapping[int, tuple[Position, ...]]]] = _no_positions
    devices: Callable[[], Awaitable[Mapping[int, DeviceUse]]] = _no_devices


class StallDetector(Protocol):
    """What decides on samples: `features.hangs.search.round_detectors.RoundDetectors`."""

    @property
    def timeout(self) -> float | None: ...

    @property
    def knows_limit(self) -> bool: ...

    @property
    def needs_figures(self) -> bool: ...

    @property
    def exchanged_at(self) -> float | None: ...

    def has_progressed(self, rank: int) -> bool: ...

    def observe(self, samples: Sequence[Evidence], steps: Mapping[int, int] | None = None) -> Decision: ...

    def note_stacks(self, stacks: Mapping[int, Sequence[tuple[str, ...]]]) -> None: ...

    def withdraw(self) -> None: ...

    def postpone(self, seconds: float) -> None: ...


class StallWatch:
    """The watch of one round. The `diagnosis` names the workers for which quiet ones wait, and has what follows done.

    `on_sample` gets each sample, and must not wait. `pauses` are those of the job over its rounds. `health` takes
    errors; without it `take` raises them. `vary` returns the seconds to wait in place of an interval.
    """

    def __init__(
        self,
        detector: StallDetector,
        sources: Sources,
        diagnosis: Diagnosis,
        pauses: LearnedPauses,
        on_sample: Callable[[Sequence[Evidence]], None] | None = None,
        health: WatchHealth | None = None,
        vary: Callable[[float], float] = lambda seconds: seconds * uniform(1 - VARIATION, 1 + VARIATION),
    ) -> None:
        self._detector = detector
        self._sampler = AdaptiveSampler(sources.sampling)
        self._sources = sources
        self._diagnosis = diagnosis
        self._pauses = pauses
        self._on_sample = on_sample
        self._health = health
        self._vary = vary
        self._ended: list[int] = []
        self._figures: dict[int, list[Evidence]] = defaultdict(list)
        # What each worker showed when its stall was looked at first, and since when that lasts.
        self._looks: dict[int, tuple[float, Look]] = {}

    async def take(self) -> float:
        """Take a sample, and carry out what follows from it; the seconds until the next one. After an error, as of a
        kernel without sock_diag or a machine with too many connections, these are RETRY_INTERVAL, and `health` shows
        the error."""
        try:
            await self.step()
        except Exception as error:
            if self._health is None:
                raise
            self._health.failed(error)
            return RETRY_INTERVAL
        if self._health is not None:
            self._health.worked()
        soon = self._sampler.is_urgent or self._detector.needs_figures or not self._detector.knows_limit
        return self._vary(QUIET_INTERVAL if soon else TRAINING_INTERVAL)

    def close(self) -> None:
        """End the watch."""
        self._sampler.close()
        self._pauses.forget_wait()

    def note_end(self, rank: int) -> None:
        """A worker has exited with 0. The others go on, and may wait for it in a collective."""
        self._ended.append(rank)
        self._sampler.forget(rank)

    async def step(self) -> None:
        """Take one sample, and carry out what the detector decides."""
        steps = self._sources.steps()
        samples, full = self._sampler.take(steps, self._detector.needs_figures, self._detector.knows_limit)
        if not samples:
            return
        if self._on_sample is not None:
            self._share(self._on_sample, samples)
        self._diagnosis.observe(samples)
        if not full:
            self._figures.clear()
        for one in samples:
            if one.figures is not None:
                # The first sample and the last are enough for the share of a processor.
                self._figures[one.rank][1:] = [one]
        decision: Decision = self._detector.observe(samples, steps)
        if self._pauses.has_wait and all(self._detector.has_progressed(one.rank) for one in samples):
            self._pauses.end_wait(samples[0].at)
        for one in samples:
            if one.figures is not None and self._detector.has_progressed(one.rank):
                # What it used before belongs to no stall.
                self._figures[one.rank] = [one]
        if isinstance(decision, AskStacks):
            self._detector.note_stacks(await self._probe(decision.ranks))
        elif isinstance(decision, Stalled):
            await self._diagnose(decision, samples)
        elif isinstance(decision, Resumed):
            self._diagnosis.resume(decision)
        elif all(one.figures is not None for one in samples):
            for stalled in self._diagnosis.due(samples[0].at):
                await self._diagnose(stalled, samples)

    def _share(self, on_sample: Callable[[Sequence[Evidence]], None], samples: Sequence[Evidence]) -> None:
        """Give the samples to the search for stragglers. A defect in it does not end, or slow down, that for hangs."""
        try:
            on_sample(samples)
        except Exception as error:
            if self._health is None:
                raise
            self._health.failed(error, "stragglers")
            self._on_sample = None

    async def _diagnose(self, stalled: Stalled, samples: Sequence[Evidence]) -> None:
        """Look closely at workers that make no progress, and have those named for which they wait. This is the one
        place at which evidence is read that costs too much while workers train."""
        at = samples[0].at
        partly = stalled.code is StallCode.ALONE and not self._diagnosis.all_quiet
        here = stalled.ranks if partly else [one.rank for one in samples]
        read = await self._sources.stacks.read(here, times=LOOKS)
        stacks = {rank: _with_lock(found) for rank, found in read.items()}
        waits = self._sources.waits()
        if any(stack.in_debugger for stack in stacks.values()):
            # A person looks at it already.
            self._detector.withdraw()
            return
        steps, timeout = self._sources.steps(), self._detector.timeout
        # A limit of the user's counts for a worker that waits outside too.
        may_be_outside = timeout is None and at - stalled.since < self._pauses.outside_limit
        suspects = []
        for one in samples:
            rank = one.rank
            late = stalled.code is StallCode.START and rank in stalled.ranks
            share, main_share = self._busy_shares(rank)
            suspect = describe_worker(
                rank, one, stacks.get(rank), share, late=late, main_share=main_share, wait=waits.get(rank)
            )
            alone = stalled.code is StallCode.ALONE and rank in stalled.ranks
            counts = timeout is not None or rank in steps
            suspects.append(replace(suspect, alone=alone, counts=counts))
        # While others train, NCCL would have all of them answer.
        positions = {} if partly else await self._sources.positions()
        devices = await self._sources.devices()
        suspects = [
            replace(one, positions=positions.get(one.rank, ()), device=devices.get(one.rank)) for one in suspects
        ]
        suspects = [self._with_moved(one, stalled.since, stacks.get(one.rank)) for one in suspects]
        suspects = [replace(one, outside=one.outside and may_be_outside) for one in hold_unproven(suspects)]
        suspects += [Suspect(rank, ended=True) for rank in self._ended]
        trains = bool(steps) or timeout is not None
        self._diagnosis.diagnose(
            Quiet(stalled, at, tuple(suspects), stacks, trains, exchanged_at=self._detector.exchanged_at)
        )

    def _busy_shares(self, rank: int) -> tuple[float, float | None]:
        """The shares of the stall in which a worker, and its main thread, used or waited for a processor."""
        samples = self._figures[rank]
        if len(samples) < 2:
            return 0.0, None
        first, last = samples
        assert first.figures is not None
        assert last.figures is not None
        before, now, seconds = first.figures.own, last.figures.own, last.at - first.at
        if last.figures.never_waited(first.figures):
            return 1.0, 1.0
        share = (now.ready - before.ready) / seconds
        return share, (now.main + now.queued - before.main - before.queued) / seconds if now.turns else None

    def _with_moved(self, suspect: Suspect, since: float, stack: Stack | None) -> Suspect:
        """The worker, and whether it has moved since the first look at this stall."""
        look = Look(0 if stack is None else stack.variables, suspect.positions)
        known_since, first = self._looks.get(suspect.rank, (None, look))
        if known_since != since:
            self._looks[suspect.rank] = (since, look)
            return suspect
        return replace(suspect, moved=has_moved(first, look, suspect.place))

    async def _probe(self, ranks: tuple[int, ...]) -> dict[int, list[tuple[str, ...]]]:
        """The innermost calls of these workers at up to BURST moments."""
        found = await self._sources.stacks.read(
            ranks, main=True, times=BURST, enough=lambda stacks: moves(_innermost(stacks))
        )
        # A worker without a stack may as well work: it counts as one that stays in its place.
        return {rank: _innermost(found.get(rank, ())) or [("",)] * SILENT_PROBES for rank in ranks}


def _with_lock(looks: Sequence[Stack]) -> Stack:
    """The last of these stacks of a worker, which holds the lock of the interpreter if it did in any: another thread
    that wants the lock gets it for a moment."""
    return looks[-1]._replace(holds_lock=True) if any(one.holds_lock for one in looks) else looks[-1]


def _innermost(stacks: Sequence[Stack]) -> list[tuple[str, ...]]:
    return [tuple(map(str, stack.main[:1])) for stack in stacks if stack.main]
