"""A report: what one node says of itself. Only that node writes it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from dlrover_run.coordination.records.activity import NodeActivity
from dlrover_run.coordination.records.bounds import (
    Count,
    Name,
    NodeId,
    Port,
    SignalName,
)
from dlrover_run.coordination.records.parts import Part, check_parts
from dlrover_run.coordination.records.round import (
    Failure,
    Member,
    NodeKey,
    PlannedChange,
    RankAssignment,
    RoundKey,
)

if TYPE_CHECKING:
    from dlrover_run.coordination.records.plan import Plan


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


class ReportPart(Part):
    """The part of `NodeReport`."""

    __slots__ = ()

    def problem(self, report: NodeReport, plan: Plan) -> str | None:
        """A sentence about what is wrong with this part of the report, else None."""
        return None

    def mismatch(self, program: str) -> str:
        """Why this node cannot take part in a job that was started with that program."""
        here = self.program
        return f"the job was started with {program} and this node with {here}: use one of them, or another --rdzv-id"


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
