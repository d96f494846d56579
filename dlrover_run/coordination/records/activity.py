"""What the tasks of a node do, for people: a part of its report that no decision depends on. Pure.

The coordinator takes it out of a report before it looks at the rest, so that a node that makes steps causes no decision
and no write, and an answer of the coordinator costs as much as that to a heartbeat.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from dlrover_run.coordination.records.bounds import (
    Count,
    Name,
    Seconds,
    Total,
)
from dlrover_run.coordination.records.resource_use import NodeUse

MAX_TASKS = 256
"""Tasks of one node whose activity is reported; of more the first."""


Ratio = Annotated[float, Meta(ge=0, le=1)]


StallCode = Annotated[str, Meta(pattern=r"\A[a-z0-9_.]{0,64}\Z")]


WatchProblem = Annotated[str, Meta(max_length=200, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]


MAX_AWAITED = 160
"""Characters of the name of an operation."""


Awaited = Annotated[str, Meta(max_length=MAX_AWAITED, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]


WAITS = "stall.waits"
"""The code of a task that makes no progress because of another one."""


class TaskActivity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one task has done in this round. `period` is the seconds of one step, `data_wait` the share of the last
    seconds in which it waited for data, each None as long as it is not known. `idle` is the seconds since its last
    step, when this was written. `stalled` is a code if it makes no progress, empty if it does."""

    name: Name
    steps: Total = 0
    period: Seconds | None = None
    data_wait: Ratio | None = None
    idle: Seconds = 0.0
    stalled: StallCode = ""


class MemoryUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What checkpoints in memory take on a node: bytes, their limit, and the files that are not on the disk yet."""

    used: Total
    limit: Total
    waiting: Total
    waiting_bytes: Total


PhaseName = Annotated[str, Meta(pattern=r"\A[a-z]{1,16}\Z")]


MAX_PHASES = 32


class PhaseTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the time of the workers of a node went, when this was written: their seconds in each phase of the ledger,
    and how many of them are in each phase from then on."""

    seconds: Annotated[dict[PhaseName, Seconds], Meta(max_length=MAX_PHASES)]
    places: Annotated[dict[PhaseName, Count], Meta(max_length=MAX_PHASES)]


class NodeActivity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the tasks of one node do. `memory` is what their checkpoints take, None if none was held in memory, and
    `times` where their time went, None if that is not known yet. `watch_problem` says why hangs are not looked for,
    empty if they are, or are not to be. `awaited` is the operation in which tasks that make no progress wait for
    another one, empty if that is not known. `ended` names tasks that have ended while others run, and `use` is what
    those that run take of processors, memory and devices, None before that was sampled."""

    tasks: Annotated[tuple[TaskActivity, ...], Meta(max_length=MAX_TASKS)]
    memory: MemoryUse | None = None
    times: PhaseTimes | None = None
    watch_problem: WatchProblem = ""
    awaited: Awaited = ""
    ended: Annotated[tuple[Name, ...], Meta(max_length=MAX_TASKS)] = ()
    use: NodeUse | None = None
