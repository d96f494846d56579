"""A round of a job: which one it is, its nodes and their ranks, what ended it, and a change that waits for it."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from dlrover_run.coordination.records.bounds import (
    MAX_TASK_NAME,
    MAX_TRACE,
    MAX_WHAT,
    Count,
    ExitStatus,
    Name,
    Port,
    Seconds,
    Total,
)
from dlrover_run.words.reasons import Code, Reason
from dlrover_run.words.text import node_name


class NodeKey(NamedTuple):
    """One process that is or was a node. Another process with the same id has another incarnation."""

    node_id: str
    incarnation: str


class RoundKey(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """Which round: its number, from 1, and the epoch of the coordinator that formed it.

    The number alone would not do. A coordinator that comes back without its journal may not know the last round and
    give the same number to another one.
    """

    epoch: int = 0
    number: Total = 0


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first worker of a node that ended badly in a round. `exit_text` describes the end, without the worker's name.

    `lost_peer` is set when, by its own error message, it only lost the connection to another worker, so the cause may
    be elsewhere. `node_rank` is the rank by which the coordinator knows the node; what a node reports of it is ignored.
    `exit_status` is that of the worker, as a shell reports it; 0 if it is not known. `task` is the name of the process
    where a rank alone does not name it, as in `chief-0` and `ps-0`; else it is empty.
    """

    rank: Total
    host: Name
    exit_text: Annotated[str, Meta(max_length=MAX_WHAT)]
    lost_peer: bool = False
    trace: Annotated[str, Meta(max_length=MAX_TRACE)] = ""
    node_rank: Count | None = None
    exit_status: ExitStatus = 0
    task: Annotated[str, Meta(max_length=MAX_TASK_NAME)] = ""

    @property
    def node(self) -> str:
        return node_name(self.host, self.node_rank)

    @property
    def reason(self) -> Reason:
        return Code.WORKER_FAILED(rank=self.rank, node=self.node, what=self.exit_text)

    def __str__(self) -> str:
        return str(self.reason)


class RankAssignment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The place of one node in one round: all that it needs to start its workers."""

    key: RoundKey
    restart_count: Count
    node_rank: Count
    nodes: Count
    workers: Count
    first_rank: Total
    world_size: Total
    role_first_rank: Total
    role_world_size: Total
    store_address: Name
    store_port: Port

    @property
    def round(self) -> int:
        return self.key.number

    @property
    def last_rank(self) -> int:
        return self.first_rank + self.workers - 1

    def has_rank(self, rank: int) -> bool:
        return 0 <= rank - self.first_rank < self.workers


class PlannedChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A change of membership that waits for the next checkpoint of the round. The epoch of the coordinator that began
    it and the job time at which it began identify it."""

    epoch: int
    since: Seconds


class Member(msgspec.Struct, frozen=True):
    """One node of a round; its node rank is its place in the plan. `done` is set when its workers had succeeded before
    it was lost, so that it is not waited for."""

    node_id: str
    incarnation: str
    host: str
    workers: int
    role: str = "default"
    done: bool = False

    @property
    def key(self) -> NodeKey:
        return NodeKey(self.node_id, self.incarnation)
