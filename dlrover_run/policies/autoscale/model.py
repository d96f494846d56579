"""What the autoscaler is told of a job, and what it remembers: bounded records, part of the plan."""

from __future__ import annotations

import enum
import math
from typing import Annotated

import msgspec
from msgspec import Meta

from dlrover_run.coordination.bounds import Count, Total
from dlrover_run.coordination.policy_records import PolicyState
from dlrover_run.coordination.reasons import BoundedReasons

MAX_SIZES = 48
"""Sizes that are remembered. A search tries fewer; of more the oldest are forgotten."""

MAX_BLOCKS = 64
"""Blocks of the measurement that is under way. When there are more, each two become one of twice the length."""

MAX_PAUSES = 5
"""Pauses of changes of which the median is used."""

MAX_LOSSES = 3
"""Losses of nodes that are remembered: with that many within `AutoscaleRules.retry` the size is given up for a time."""

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


class Progress(msgspec.Struct, frozen=True):
    """What the workers have done in a round: steps, which all of them make together, and samples of all workers if they
    count them. `at` is the job time of the last step, in seconds."""

    steps: int
    at: float
    samples: int | None = None


class Failure(msgspec.Struct, frozen=True):
    """The last round that ended because a worker failed, and its number of nodes."""

    round: int
    size: int


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """The job now. `round` is the number of its last round, and `size` the nodes that train in it, 0 between two
    rounds. `present` nodes could train, spares included. `remaining` is how many seconds of training are left, None if
    that is not known. Nothing is decided while the job is `busy`, as when nodes are checked or a worker has succeeded.
    """

    round: int
    size: int
    present: int
    progress: Progress | None = None
    failure: Failure | None = None
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
    """More than `size` nodes are not requested before `until`, because nodes did not come or did not stay, for the
    `refusals`th time in succession."""

    size: Count = 0
    until: Time = 0.0
    refusals: Count = 0


class AutoscaleState(msgspec.Struct, PolicyState, frozen=True, forbid_unknown_fields=True, tag="autoscale"):
    """What the autoscaler knows and wants.

    `target` is the number of nodes that the job should have, 0 as long as it wants none, and `before` the number that
    trained when that was decided. `changes` counts those of this search. `started_at` is the job time of the first step
    that was seen, and `paused_at` when the last round ended, None once the pause is over. `short_since` is since when
    fewer than `target` nodes train, and `losses` are the times at which such a shortage began in a round. A change of
    the throughput begins no other search before `quiet_until`, 0 while a search goes on; `confirmed` is how many
    searches in succession have ended with `settled_size`.
    """

    target: Count = 0
    before: Count = 0
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
