"""Where one worker is in the collectives of one group: a small record, which nodes send to each other."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from dlrover_run.coordination.records.bounds import Count, Total
from dlrover_run.features.hangs.collectives.rank_sets import RankSet

MAX_POSITIONS = 6
"""Positions of one worker that are kept: those in the groups that it used last. A worker of tensor, pipeline and data
parallelism is in four to six groups."""

MAX_GROUP = 64
MAX_NAME = 40
MAX_OPERATION = 40
MAX_DTYPE = 20

DEFAULT_GROUP = "default_pg"
"""What torch calls the group of all ranks."""

# Without control characters: other nodes print them.
GroupId = Annotated[str, Meta(min_length=1, max_length=MAX_GROUP, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
GroupName = Annotated[str, Meta(max_length=MAX_NAME, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
OperationName = Annotated[str, Meta(max_length=MAX_OPERATION, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
DataType = Annotated[str, Meta(max_length=MAX_DTYPE, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]


class Source(enum.StrEnum):
    """What shows a position."""

    RAS = "ras"
    FLIGHT_RECORDER = "flight_recorder"


class Position(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where one worker is in the collectives of one group.

    `group` is the same text on all ranks of the group, for one source. `name` is that of torch, empty if unknown. The
    group has `size` ranks, 0 if unknown; `members` are its global ranks as far as they are known, as a text of
    `collectives.rank_sets`.

    `entered` is the number of the last operation that the worker has entered: with NCCL it is enqueued, not begun.
    `completed` is that of the last one that has ended, None if unknown. NCCL RAS counts each kind of operation of a
    group by itself, the flight recorder all of a group together; `counter` says which numbers can be compared.

    `operation`, `bytes` and `dtype` describe the operation `number`: the first that has not ended, or the last entered.
    `bytes` is None if unknown. A `peer` is the global rank to or from which it sends or receives.

    `furthest` is the highest number that any rank of the group has entered, and `ahead` the number of ranks that have
    entered an operation which this one has not, as far as the source shows other ranks; both 0 if it does not.
    """

    group: GroupId
    source: Source
    operation: OperationName
    entered: Total
    number: Total
    completed: Total | None = None
    name: GroupName = ""
    size: Count = 0
    members: RankSet = ""
    bytes: Total | None = None
    dtype: DataType = ""
    peer: Total | None = None
    furthest: Total = 0
    ahead: Count = 0

    @property
    def counter(self) -> tuple[str, str, str]:
        """What `entered` counts: positions with the same counter can be compared."""
        by_kind = self.operation if self.source is Source.RAS else "point-to-point" if self.peer is not None else ""
        return (self.source, self.group, by_kind)

    @property
    def waits(self) -> bool | None:
        """Whether the worker has entered an operation that has not ended; None if the source does not say."""
        return None if self.completed is None else self.completed < self.entered
