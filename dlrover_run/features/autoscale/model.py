"""What the autoscaler knows of a job, and what it remembers: bounded records, part of the plan, of the report of the
node with rank 0, and of the assignments of a few nodes."""

from __future__ import annotations

import enum
import math
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from dlrover_run.coordination.records.assignment import AssignmentPart
from dlrover_run.coordination.records.bounds import Count, Total
from dlrover_run.coordination.records.plan import Plan, PlanPart
from dlrover_run.coordination.records.report import ReportPart
from dlrover_run.coordination.records.round import RoundKey
from dlrover_run.coordination.records.size_choice import MeasuredSize, SizeChoice
from dlrover_run.features.autoscale.command import CommandResult, CommandRun
from dlrover_run.features.autoscale.text import AutoscaleCode
from dlrover_run.words.reasons import BoundedReasons, Reasons, render

MAX_SIZES = 48
"""Sizes that are remembered. A search tries fewer; of more the oldest are forgotten."""

MAX_BLOCKS = 64
"""Blocks of the measurement that is under way. When there are more, each two become one of twice the length."""

MAX_PAUSES = 5
"""Pauses of changes of which the median is used."""

MAX_LOSSES = 3
"""Losses of nodes that are remembered: with that many within `AutoscaleRules.retry` the size is given up for a time."""

MAX_CRASHES = 2
"""Sizes beyond the largest, or below the smallest, that were measured, at which workers may fail before no other one
there is tried; and failures of one size that cost no restart."""

Time = Annotated[float, Meta(ge=0, le=1e12)]
Log = Annotated[float, Meta(ge=-1e3, le=1e3)]
Spread = Annotated[float, Meta(ge=0, le=1e3)]


class Sizes(msgspec.Struct, frozen=True):
    """The numbers of nodes that a job may have: multiples of `unit`, from `fewest` to `most`, which are two of them."""

    fewest: int
    most: int
    unit: int = 1

    def __contains__(self, size: object) -> bool:
        return isinstance(size, int) and self.fewest <= size <= self.most and size % self.unit == 0

    def below(self, size: float) -> int:
        """The largest size that is not above this number; the smallest one if all are."""
        return max(self.fewest, min(self.most, math.floor(size / self.unit) * self.unit))

    @property
    def max_changes(self) -> int:
        """The most changes until a search has settled."""
        return math.floor(2 * math.log2(self.most // self.unit)) + 1


class StepsReport(msgspec.Struct, frozen=True):
    """What the workers have done in a round: steps, which all of them make together, and samples of all workers if they
    count them. `at` is the job time of the last step, in seconds. `left` is what the job has still to train, in samples
    if they are counted, else in steps; None if that is not known."""

    steps: int
    at: float
    samples: int | None = None
    left: int | None = None


class FailureAtSize(msgspec.Struct, frozen=True):
    """The last round that ended because a worker failed, and its number of nodes."""

    round: int
    size: int


class SizeView(msgspec.Struct, frozen=True, kw_only=True):
    """The job now. `round` is the number of its last round, and `size` the nodes that train in it, 0 between two
    rounds. `present` nodes could train, spares included. `remaining` is how many seconds of training are left, None if
    that is not known. Nothing is decided while the job is `busy`, as when nodes are checked or a worker has succeeded.
    """

    round: int
    size: int
    present: int
    progress: StepsReport | None = None
    failure: FailureAtSize | None = None
    remaining: float | None = None
    busy: bool = False


class Condition(enum.StrEnum):
    """The state of the search, with the names that KubeDL has for them."""

    START = "Start"
    CONTINUE = "Continue"
    STOP = "Stop"
    BEST = "ReachMaxMetric"
    LARGEST = "ReachMaxReplicas"

    @property
    def has_settled(self) -> bool:
        """Whether the search is over."""
        return self in (Condition.BEST, Condition.LARGEST)

    @property
    def is_quiet(self) -> bool:
        """Whether no other size is tried now."""
        return self.has_settled or self is Condition.STOP


class SizeRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of one size: the natural logarithm of the work per second, the standard error of that, how many
    blocks it is from, and at which job time it was measured. `crashes` of a size that has never been measured forbid it
    until `again_at`."""

    size: Count
    rate: Log = 0.0
    error: Spread = 0.0
    blocks: Count = 0
    at: Time = 0.0
    crashes: Count = 0
    again_at: Time = 0.0


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measurement of a round. `first_at` is the job time of the first step that was seen; `steps`, `work` and `at`
    are those at the begin of the block that is under way, `at` None before it. `blocks` are logarithms of the work per
    second, each over at least `seconds`, 0 for the usual length, and `measured` is how many seconds they were together.
    """

    round: Total = 0
    size: Count = 0
    first_at: Time | None = None
    steps: Total = 0
    work: Annotated[float, Meta(ge=0, le=1e300)] = 0.0
    at: Time | None = None
    seconds: Time = 0.0
    measured: Time = 0.0
    blocks: Annotated[tuple[Log, ...], Meta(max_length=MAX_BLOCKS)] = ()


class Ceiling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The job does not wait for more than `size` nodes before `until`, because nodes did not come or did not stay, for
    the `refusals`th time in succession. `losses` of these times nodes had come, and did not stay."""

    size: Count = 0
    until: Time = 0.0
    refusals: Count = 0
    losses: Count = 0

    @property
    def is_lifted_by_nodes(self) -> bool:
        """Whether nodes that come are tried at once: those that did not stay get one more chance before `until`."""
        return self.losses <= 1


class RoundClock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The job time at which the node with rank 0 began to count the steps of the round `key`. The node counts seconds
    from then on, so no clocks of two hosts are compared."""

    key: RoundKey = RoundKey()
    began: Annotated[float, Meta(ge=-1e12, le=1e12)] = 0.0


class AutoscaleState(msgspec.Struct, PlanPart, frozen=True, forbid_unknown_fields=True, tag="autoscale"):
    """What the autoscaler knows and wants.

    `target` is the number of nodes that a round should have, 0 as long as none is wanted, and `before` the number that
    trained when that was decided. `wish` is a larger number that would be tried if there were as many nodes, though the
    job does not wait for them; 0 without one. `changes` counts those of this search. `started_at` is the job time of
    the first step that was seen, and `paused_at` when the last round ended, None once the pause is over. `short_since`
    is since when fewer than `target` nodes train, and `losses` are the times at which such a shortage began in a round.
    A change of the throughput begins no other search before `quiet_until`, 0 while a search goes on; `confirmed` is how
    many searches in succession have ended with `settled_size`. `command` is the last run of the user's command that
    starts and ends nodes. `changed_at` is when anything of this but what is
    measured has last changed, and `epoch` the coordinator that changed it.
    """

    target: Count = 0
    before: Count = 0
    wish: Count = 0
    condition: Condition = Condition.START
    reasons: BoundedReasons = ()
    table: Annotated[tuple[SizeRecord, ...], Meta(max_length=MAX_SIZES)] = ()
    measurement: Measurement = Measurement()
    pauses: Annotated[tuple[Time, ...], Meta(max_length=MAX_PAUSES)] = ()
    paused_at: Time | None = None
    started_at: Time | None = None
    changes: Count = 0
    failed_round: Total = 0
    ceiling: Ceiling = Ceiling()
    short_since: Time | None = None
    losses: Annotated[tuple[Time, ...], Meta(max_length=MAX_LOSSES)] = ()
    settled_size: Count = 0
    quiet_until: Time = 0.0
    confirmed: Count = 0
    clock: RoundClock = RoundClock()
    command: CommandRun | None = None
    changed_at: Time = 0.0
    epoch: int = 0

    @property
    def wanted_nodes(self) -> int:
        return self.target

    @property
    def size_choice(self) -> SizeChoice:
        reasons: Reasons = self.reasons
        if self.measurement.first_at is None and not self.table:
            reasons = (AutoscaleCode.NO_STEPS(),)
        return SizeChoice(
            wanted_nodes=max(self.target, self.wish),
            chosen_nodes=self.target,
            condition=self.condition,
            reason=render(reasons),
            reasons=reasons,
            command_failed=self.command is not None and bool(self.command.failed),
            measuring=len(self.measurement.blocks),
            sizes=_measured_sizes(self.table),
        )

    def excuse_failure(self, plan: Plan) -> Reasons:
        """The round had a size that was only tried: a few failures of it cost no restart."""
        size = len(plan.members)
        if size != plan.wanted_nodes or not any(record.blocks for record in self.table):
            return ()
        tried = next((record for record in self.table if record.size == size), None)
        if tried is not None and (tried.blocks or tried.crashes >= MAX_CRASHES):
            return ()
        return (AutoscaleCode.TRIED_SIZE(size=size),)

    @property
    def lasting(self) -> AutoscaleState:
        """What is worth keeping when a coordinator without a journal takes over: all but the measurement that is under
        way."""
        return replace(
            self, measurement=Measurement(), paused_at=None, started_at=None, short_since=None, clock=RoundClock()
        )


def _measured_sizes(table: tuple[SizeRecord, ...]) -> tuple[MeasuredSize, ...]:
    ordered = sorted(table, key=lambda one: one.size)
    measured = [one for one in ordered if one.blocks]
    efficiency = {
        large.size: (large.rate - small.rate) / math.log(large.size / small.size) for small, large in pairwise(measured)
    }
    return tuple(
        MeasuredSize(
            nodes=one.size,
            throughput=float(f"{math.exp(one.rate):.6g}") if one.blocks else None,
            error=float(f"{one.error:.3g}") if one.blocks else None,
            efficiency=round(efficiency[one.size], 3) if one.size in efficiency else None,
            blocks=one.blocks,
            failures=one.crashes,
        )
        for one in ordered
    )


def recovered(state: AutoscaleState) -> AutoscaleState:
    """What a node has kept, in the job time of a coordinator that has just begun to count: the times that are left
    begin again."""

    def left(time: float) -> float:
        return max(0.0, time - state.changed_at)

    return replace(
        state.lasting,
        table=tuple(replace(one, at=0.0, again_at=left(one.again_at)) for one in state.table),
        ceiling=replace(state.ceiling, until=left(state.ceiling.until)),
        quiet_until=max(1e-3, left(state.quiet_until)) if state.quiet_until else 0.0,
        losses=(),
        command=None if state.command is None else replace(state.command, at=0.0),
        changed_at=0.0,
    )


class AutoscaleNodeReport(msgspec.Struct, ReportPart, frozen=True, forbid_unknown_fields=True, tag="autoscale"):
    """What a node reports. That with rank 0 counts the steps of its first worker in the round `key`, and the samples of
    all workers of the round, by those of that worker: all make the same steps. `seconds` is the time from
    the first step that the node has seen to the last one, and `age` how long ago that was. `left` is what the job has
    still to train, as in `StepsReport`. `known` is the last state
    that the node was given to keep, and `command` the result of the last run of the command that it was given."""

    key: RoundKey = RoundKey()
    steps: Total = 0
    samples: Total | None = None
    seconds: Time = 0.0
    age: Time = 0.0
    left: Total | None = None
    known: AutoscaleState | None = None
    command: CommandResult | None = None


class AutoscaleAssignment(msgspec.Struct, AssignmentPart, frozen=True, forbid_unknown_fields=True, tag="autoscale"):
    """How often a node is to report its steps, in seconds, 0 for never, what it is to keep for a coordinator that has
    lost its records, and the run of the command that it is to begin, unless it has."""

    interval: Time = 0.0
    known: AutoscaleState | None = None
    command: CommandRun | None = None
