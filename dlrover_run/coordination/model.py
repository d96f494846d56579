"""The records that the processes of a job exchange: what one node reports, and what the job is to do.

All are frozen and small. A reader acts on the latest one that it has seen, never on the difference between two, so that
a lost or repeated copy changes nothing. Those that travel refuse unknown fields and have bounds.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
from msgspec import Meta

from dlrover_run.coordination.activity import NodeActivity, Seconds
from dlrover_run.coordination.bounds import (
    MAX_TASK_NAME,
    MAX_TRACE,
    MAX_WHAT,
    Count,
    ExitStatus,
    Name,
    NodeId,
    Port,
    SignalName,
    Total,
)
from dlrover_run.coordination.parts import (
    AssignmentPart,
    Dismissal,
    PlanPart,
    ReportPart,
    WaitingPart,
    check_parts,
)
from dlrover_run.coordination.rules import DesiredSize
from dlrover_run.words.reasons import BoundedReasons, Code, Reason, render
from dlrover_run.words.text import node_name

if TYPE_CHECKING:
    from dlrover_run.coordination.size_choice import SizeChoice


class NodePhase(enum.StrEnum):
    """What a node is doing in the round in which it has ranks.

    LEAVING: it was requested to leave, and its workers have their grace. LEFT: it takes no part any more.
    """

    WAITING = "waiting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LEAVING = "leaving"
    LEFT = "left"


class PlanPhase(enum.StrEnum):
    """What the whole job is doing."""

    GATHERING = "gathering"
    TRAINING = "training"
    FINISHED = "finished"
    FAILED = "failed"


OVER = frozenset({PlanPhase.FINISHED, PlanPhase.FAILED})


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


class NodeReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one node reports of itself; only that node writes it.

    `port` is free and held by the node for the store of the next round, in case the store is placed there; it is
    another one after each round, and each coordinator, that the node knows of. `phase` and `failure` are about
    `ranks`: the ranks that the node has taken, None before its first and while it waits without any. `known_round` is
    the latest round that the node knows of, whether it took part or not. `epoch` is the latest coordinator that it
    obeys, which sent it `restart_count`. `progressed` is set once the workers of this round have found each other or
    have written a checkpoint. `saves` is set once they have marked a checkpoint, and `saved_for` is the planned change
    after whose announcement they have marked one. `preparing` is set while a node without ranks imports what its
    workers need, which they would wait for. `program` names what it is to run. `preferred_rank` is the node rank that
    the user gave it. `parts` are what it reports to the features of the job. `ended_by` names the signal for
    which it leaves, or has left; it is empty where there is none.
    `activity` is what its tasks do, which only a status shows.
    """

    node_id: NodeId
    incarnation: NodeId
    host: Name
    address: Name
    port: Port
    workers: Count
    role: Name = "default"
    program: Name = ""
    preferred_rank: Count | None = None
    phase: NodePhase = NodePhase.WAITING
    ranks: RankAssignment | None = None
    known_round: RoundKey = RoundKey()
    epoch: int = 0
    restart_count: Count = 0
    progressed: bool = False
    saves: bool = False
    saved_for: PlannedChange | None = None
    preparing: bool = False
    failure: Failure | None = None
    parts: tuple[ReportPart, ...] = ()
    ended_by: SignalName = ""
    activity: NodeActivity | None = None

    def __post_init__(self) -> None:
        check_parts(self.parts)

    @property
    def key(self) -> NodeKey:
        return NodeKey(self.node_id, self.incarnation)

    @property
    def member(self) -> Member:
        """The node as a member of the next round."""
        return Member(self.node_id, self.incarnation, self.host, self.workers, self.role)

    def in_round(self, key: RoundKey) -> bool:
        return self.ranks is not None and self.ranks.key == key

    def owns(self, ranks: Sequence[int]) -> bool:
        """Whether each of `ranks` is one of the node's, and none is there twice."""
        own = self.ranks is not None and all(map(self.ranks.has_rank, ranks))
        return own and len(set(ranks)) == len(ranks)


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


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the whole job should do now; only the coordinator writes it.

    Times are *job time*: seconds that coordinators of this job have counted, each going on from `clock`, the moment at
    which the last plan of its predecessor was written. `epoch` is the coordinator that wrote the plan, `key` the latest
    round, `members` its nodes in the order of their ranks; while GATHERING those of the last round, whose ranks are
    kept for them. `since` is when the phase began. `restart_count` failures were answered with a new round, at the
    times `restart_times`. `early_failures` rounds in succession failed before any worker made progress. `failure` is
    what ended the last round, if a worker did. `reasons` are the codes of why the plan is as it is. `parts` are
    the states of the job's features. `draining` are nodes that an operator has asked to leave, `to_drain` those that
    are to leave with the planned change. `saves` is set once a worker of the job has marked a checkpoint. `change` is
    the planned change that waits for the next one. `desired` is the size that an operator has asked for. `quorum` is
    how many of `members`, or of all nodes if no members are known, have to be here before the next round, 0 for any
    number: after a succession the others may still have the old master.
    """

    epoch: int = 0
    clock: float = 0.0
    phase: PlanPhase = PlanPhase.GATHERING
    since: float = 0.0
    key: RoundKey = RoundKey()
    members: tuple[Member, ...] = ()
    store_address: str = ""
    store_port: int = 0
    restart_count: int = 0
    restart_times: tuple[float, ...] = ()
    early_failures: int = 0
    failure: Failure | None = None
    reasons: BoundedReasons = (Code.NO_REPORT_YET(),)
    parts: tuple[PlanPart, ...] = ()
    draining: tuple[NodeKey, ...] = ()
    to_drain: tuple[NodeKey, ...] = ()
    saves: bool = False
    change: PlannedChange | None = None
    desired: DesiredSize | None = None
    quorum: int = 0

    def __post_init__(self) -> None:
        check_parts(self.parts)

    @property
    def reason(self) -> str:
        return render(self.reasons)

    @property
    def wanted_nodes(self) -> int:
        """The fewest nodes that a feature wants a round to have, 0 for as many as may be. A size that an operator has
        fixed takes precedence."""
        if self.desired is not None and self.desired.fixed:
            return 0
        return min((part.wanted_nodes for part in self.parts if part.wanted_nodes), default=0)

    @property
    def size_choice(self) -> SizeChoice | None:
        """What the feature that chooses the number of nodes wants, and why; None in a job without one."""
        return next((choice for part in self.parts if (choice := part.size_choice) is not None), None)


class Waiting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a node without ranks waits for, and how many seconds at most from now, None for no limit. `parts` are what
    the features of the job show meanwhile."""

    reasons: BoundedReasons
    seconds: float | None = None
    parts: tuple[WaitingPart, ...] = ()

    def __post_init__(self) -> None:
        check_parts(self.parts)

    @property
    def text(self) -> str:
        return render(self.reasons)


MAX_PEERS = 3
"""Other nodes whose addresses a node receives, by which it finds out whether it is cut off."""


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Where another node of the job answers. Nothing need listen there."""

    address: Name
    port: Port


Peers = Annotated[tuple[Peer, ...], Meta(max_length=MAX_PEERS)]

MAX_SUCCESSORS = 8
"""Nodes that may start the next master; each node receives their addresses. All of them are hardly lost at once."""

Successors = Annotated[tuple[Name, ...], Meta(max_length=MAX_SUCCESSORS)]


class NodeView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One node's own part of its assignment, which no other node receives. `ranks` is None for a node without ranks in
    the round. `parts` are what the features of the job assign to the node. `peers` are some nodes on other machines,
    `successors` the addresses of the nodes that may start the next master, in the order of their ranks. `drains` asks
    the node to leave."""

    ranks: RankAssignment | None = None
    parts: tuple[AssignmentPart, ...] = ()
    peers: Peers = ()
    successors: Successors = ()
    drains: bool = False

    def __post_init__(self) -> None:
        check_parts(self.parts)

    @property
    def waits(self) -> bool:
        """Whether the node has nothing to run in the job, and waits until it has."""
        return self.ranks is None and not any(part.has_tasks for part in self.parts)

    @property
    def dismissal(self) -> Dismissal | None:
        """Why the node is to leave the job; None if it is not."""
        return next((part.dismissal for part in self.parts if part.dismissal is not None), None)

    @property
    def is_announced(self) -> bool:
        """Whether the node prints all of what came of its parts itself, so that only warnings of the coordinator are
        printed. A line that is printed twice is better than one that is lost."""
        return bool(self.parts) and all(part.is_announced for part in self.parts)

    @property
    def needs_idle_node(self) -> bool:
        """Whether the node has something to try before it may train, for which its devices have to be free."""
        return any(part.needs_idle_node for part in self.parts)


class Assignment(NodeView, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The part of the plan that one node needs. `change` is the planned change for which it reports the next
    checkpoint. `waiting` is what it waits for, if it waits."""

    epoch: int = 0
    phase: PlanPhase = PlanPhase.GATHERING
    key: RoundKey = RoundKey()
    restart_count: Count = 0
    reasons: BoundedReasons = ()
    failure: Failure | None = None
    change: PlannedChange | None = None
    waiting: Waiting | None = None

    @property
    def reason(self) -> str:
        return render(self.reasons)
