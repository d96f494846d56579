"""Watches the workers of one round on this node, or the TensorFlow tasks: takes samples, asks the detector, and reports
a stall with its stacks.

It is a consumer of the agent's `Tick`, and lives with its round: a report about an earlier round could only be wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import uniform
from typing import Protocol

import msgspec

from dlrover_run.features.hangs.node.looks import Looks, Sampling
from dlrover_run.features.hangs.node.stall_report import Names, StallReport
from dlrover_run.features.hangs.node.watch_health import RETRY_INTERVAL, WatchHealth
from dlrover_run.features.hangs.search.detector import AskStacks, Decision, Resumed, StallCode, Stalled
from dlrover_run.features.hangs.search.guilt import Finding, find_alone, find_stall, is_held_back, ranks_to_restart
from dlrover_run.features.hangs.search.outside import LearnedPauses
from dlrover_run.features.hangs.search.spin import PROBES, moves
from dlrover_run.features.hangs.search.suspects import Suspect, describe_worker
from dlrover_run.features.hangs.stalls.model import StallNodeReport
from dlrover_run.observe.records import Evidence
from dlrover_run.stacks.stack import Stack
from dlrover_run.words.reasons import Reasons

TRAINING_INTERVAL = 1.0
"""Seconds between two samples while the workers exchange data. One takes some 2 ms for 8 workers."""

QUIET_INTERVAL = 0.5
"""Seconds between two samples while they do not, and until their rhythm is known: pauses that are measured more often
are learned earlier."""


BURST = PROBES // 3
"""Stacks of a busy worker that are read, one after the other, after a sample, unless fewer show that it works."""

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


Find = Callable[[Stalled, Sequence[Suspect], Mapping[int, Stack]], Finding | None]
"""Names the workers for which others wait, of all that were sampled; None if it is no stall."""


@dataclass(frozen=True)
class _Quiet:
    """What a stall of this node showed when it was found."""

    stalled: Stalled
    stacks: Mapping[int, Stack]


class StallWatch:
    """The watch of one round. `steps` reads the steps that workers have reported, by rank; `on_stall` and `on_resume`
    are called from the event loop.

    Without `on_quiet` the workers of this node are all of the round. With it, it is called with what is known of them
    when they make no progress, and with None when they do again; whether that is a stall comes back by `confirm`. The
    ages of data count from the last data that the node has exchanged.
    `on_sample` gets each sample, and must not wait. `find` replaces the rules for a round, and `names` the names of its
    ranks. `pauses` are those of the job over its rounds. `health` takes errors; without it `take` raises
    them. `vary` returns the seconds to wait in place of an interval.
    """

    def __init__(
        self,
        detector: StallDetector,
        sampling: Sampling,
        stacks: Stacks,
        on_stall: Callable[[StallReport], None],
        on_resume: Callable[[Resumed], None],
        steps: Callable[[], Mapping[int, int]] = dict,
        on_quiet: Callable[[StallNodeReport | None], None] | None = None,
        on_sample: Callable[[Sequence[Evidence]], None] | None = None,
        find: Find | None = None,
        names: Names | None = None,
        health: WatchHealth | None = None,
        pauses: LearnedPauses | None = None,
        vary: Callable[[float], float] = lambda seconds: seconds * uniform(1 - VARIATION, 1 + VARIATION),
    ) -> None:
        self._detector = detector
        self._looks = Looks(sampling)
        self._stacks = stacks
        self._on_stall = on_stall
        self._on_resume = on_resume
        self._steps = steps
        self._on_quiet = on_quiet
        self._on_sample = on_sample
        self._find = find or self._find_in_round
        self._names = names
        self._health = health
        self._pauses = pauses or LearnedPauses()
        # Since when a worker waits outside that was not named for it, and when what was found of it is looked at again.
        self._outside_since: float | None = None
        self._again_at = float("inf")
        self._vary = vary
        self._ranks: tuple[int, ...] = ()
        self._ended: list[int] = []
        self._figures: dict[int, list[Evidence]] = defaultdict(list)
        self._sampled_at = 0.0
        # What all workers showed when they were quiet, and those that are quiet by themselves.
        self._quiet: _Quiet | None = None
        self._quiet_alone: _Quiet | None = None
        self._quiet_count = 0
        self._is_reported = False

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
        soon = self._looks.suspects or self._detector.needs_figures or not self._detector.knows_limit
        return self._vary(QUIET_INTERVAL if soon else TRAINING_INTERVAL)

    def close(self) -> None:
        """End the watch."""
        self._looks.close()

    def note_end(self, rank: int) -> None:
        """A worker has exited with 0. The others go on, and may wait for it in a collective."""
        self._ended.append(rank)
        self._looks.forget(rank)

    def confirm(
        self,
        guilty: tuple[int, ...],
        reasons: Reasons,
        to_restart: tuple[int, ...],
        nodes: tuple[str, ...],
        alone: bool = False,
    ) -> None:
        """No node of the round makes progress, or with `alone` some do, and these workers are guilty. Nothing follows
        if the workers of this node make progress again."""
        quiet = self._quiet_alone if alone else self._quiet
        if quiet is not None:
            self._report(quiet, guilty, reasons, to_restart, nodes)

    async def step(self) -> None:
        """Take one sample, and carry out what the detector decides."""
        steps = self._steps()
        samples, full = self._looks.take(steps, self._detector.needs_figures, self._detector.knows_limit)
        if not samples:
            return
        if self._on_sample is not None:
            self._share(self._on_sample, samples)
        self._ranks = tuple(one.rank for one in samples)
        self._sampled_at = samples[0].at
        if not full:
            self._figures.clear()
        for one in samples:
            if one.figures is not None:
                # The first sample and the last are enough for the share of a processor.
                self._figures[one.rank][1:] = [one]
        decision: Decision = self._detector.observe(samples, steps)
        self._note_waits_outside()
        for one in samples:
            if one.figures is not None and self._detector.has_progressed(one.rank):
                # What it used before belongs to no stall.
                self._figures[one.rank] = [one]
        if isinstance(decision, AskStacks):
            self._detector.note_stacks(await self._probe(decision.ranks))
        elif isinstance(decision, Stalled):
            await self._on_no_progress(decision, samples)
        elif isinstance(decision, Resumed):
            self._resume(decision)
        elif self._sampled_at >= self._again_at and all(one.figures is not None for one in samples):
            for quiet in filter(None, (self._quiet, self._quiet_alone)):
                await self._on_no_progress(quiet.stalled, samples)

    def _note_waits_outside(self) -> None:
        """A wait outside that is over has shown how long they may be."""
        if self._outside_since is not None and all(map(self._detector.has_progressed, self._ranks)):
            self._pauses.note_outside(self._sampled_at - self._outside_since)
            self._outside_since = None

    def _share(self, on_sample: Callable[[Sequence[Evidence]], None], samples: Sequence[Evidence]) -> None:
        """Give the samples to the search for stragglers. A defect in it does not end, or slow down, that for hangs."""
        try:
            on_sample(samples)
        except Exception as error:
            if self._health is None:
                raise
            self._health.failed(error, "stragglers")
            self._on_sample = None

    async def _on_no_progress(self, stalled: Stalled, samples: Sequence[Evidence]) -> None:
        partly = stalled.code is StallCode.ALONE and self._quiet is None
        found = await self._stacks.read(stalled.ranks if partly else self._ranks)
        stacks = {rank: read[-1] for rank, read in found.items()}
        if any(stack.in_debugger for stack in stacks.values()):
            # A person looks at it already.
            self._detector.withdraw()
            return
        suspects = self._suspects(stalled, samples, stacks)
        quiet = _Quiet(stalled, stacks)
        if self._on_quiet is not None:
            self._note_quiet(quiet, suspects)
            return
        finding = self._find(stalled, suspects, stacks)
        if finding is None:
            self._detector.withdraw()
        elif is_held_back(finding, suspects):
            self._outside_since = stalled.since
            if stalled.code is StallCode.ALONE:
                self._detector.withdraw()
            else:
                self._detector.postpone(self._pauses.outside_limit)
        elif self._sampled_at - stalled.since < finding.min_quiet:
            self._detector.postpone(finding.min_quiet)
        else:
            self._report(quiet, finding.ranks, finding.reasons, ranks_to_restart(finding, suspects), ())

    def _suspects(self, stalled: Stalled, samples: Sequence[Evidence], stacks: Mapping[int, Stack]) -> list[Suspect]:
        """What is known of each worker, and those that have ended."""
        counting = self._steps()
        alone = stalled.ranks if stalled.code is StallCode.ALONE else ()
        if self._quiet_alone is not None:
            alone = alone or self._quiet_alone.stalled.ranks
        suspects = []
        for one in samples:
            suspect = describe_worker(
                one.rank,
                one,
                stacks.get(one.rank),
                self._busy_share(one.rank),
                late=stalled.code is StallCode.START and one.rank in stalled.ranks,
            )
            if one.rank in alone:
                counts = one.rank in counting or self._detector.timeout is not None
                suspect = msgspec.structs.replace(suspect, alone=True, counts=counts)
            if suspect.outside and not self._may_be_outside(stalled):
                suspect = msgspec.structs.replace(suspect, outside=False)
            suspects.append(suspect)
        return suspects + [Suspect(rank, ended=True) for rank in self._ended]

    def _may_be_outside(self, stalled: Stalled) -> bool:
        """Whether a worker may wait outside for so long. A limit of the user's counts for it too."""
        return self._detector.timeout is None and self._sampled_at - stalled.since < self._pauses.outside_limit

    def _note_quiet(self, quiet: _Quiet, suspects: Sequence[Suspect]) -> None:
        """Have this node report what it has found; whether it is a stall comes back by `confirm`."""
        assert self._on_quiet is not None
        partly = False
        if quiet.stalled.code is StallCode.ALONE:
            self._quiet_alone = quiet
            partly = self._quiet is None
        else:
            self._quiet = quiet
        if partly or self._quiet is quiet:
            self._quiet_count += 1
        here = suspects if not partly else [one for one in suspects if one.alone]
        self._again_at = float("inf")
        if any(one.outside for one in here):
            self._outside_since = quiet.stalled.since
            self._again_at = quiet.stalled.since + self._pauses.outside_limit
        self._on_quiet(
            StallNodeReport(self._quiet_count, self._trains, tuple(map(self._with_common_age, here)), partly)
        )

    @property
    def _trains(self) -> bool:
        return bool(self._steps()) or self._detector.timeout is not None

    def _find_in_round(
        self, stalled: Stalled, suspects: Sequence[Suspect], stacks: Mapping[int, Stack]
    ) -> Finding | None:
        if stalled.code is StallCode.ALONE:
            return find_alone(suspects)
        return find_stall(suspects, trains=self._trains)

    def _with_common_age(self, suspect: Suspect) -> Suspect:
        """The worker with an age that can be compared with those on other nodes, which have clocks of their own."""
        last = self._detector.exchanged_at
        if suspect.sent_age is None or last is None:
            return msgspec.structs.replace(suspect, sent_age=None)
        return msgspec.structs.replace(suspect, sent_age=suspect.sent_age - (self._sampled_at - last))

    def _report(
        self,
        quiet: _Quiet,
        guilty: tuple[int, ...],
        reasons: Reasons,
        to_restart: tuple[int, ...],
        nodes: tuple[str, ...],
    ) -> None:
        self._is_reported = True
        seconds = self._sampled_at - quiet.stalled.since
        if self._outside_since is not None:
            self._pauses.note_outside(seconds)
            self._outside_since = None
        self._on_stall(
            StallReport(quiet.stalled, guilty, reasons, seconds, quiet.stacks, to_restart, nodes, self._names)
        )

    def _resume(self, resumed: Resumed) -> None:
        if self._on_quiet is not None:
            self._quiet = self._quiet_alone = None
            self._again_at = float("inf")
            self._on_quiet(None)
            if not self._is_reported:
                return
        self._is_reported = False
        self._on_resume(resumed)

    def _busy_share(self, rank: int) -> float:
        samples = self._figures[rank]
        if len(samples) < 2:
            return 0.0
        first, last = samples
        assert first.figures is not None
        assert last.figures is not None
        return (last.figures.own.ready - first.figures.own.ready) / (last.at - first.at)

    async def _probe(self, ranks: tuple[int, ...]) -> dict[int, list[tuple[str, ...]]]:
        """The innermost calls of these workers at up to BURST moments."""
        found = await self._stacks.read(ranks, main=True, times=BURST, enough=lambda stacks: moves(_innermost(stacks)))
        # A worker without a stack may as well work: it counts as one that stays in its place.
        return {rank: _innermost(found.get(rank, ())) or [("",)] * SILENT_PROBES for rank in ranks}


def _innermost(stacks: Sequence[Stack]) -> list[tuple[str, ...]]:
    return [tuple(map(str, stack.main[:1])) for stack in stacks if stack.main]
