"""The two records that the processes of a job agree on: what one node says, and what the job shall do.

Both are frozen, small and free of behaviour. A reader acts on the latest one that it has seen, never on the difference
between two, so that a lost or repeated copy changes nothing.
"""

from __future__ import annotations

import enum

import msgspec


class NodePhase(str, enum.Enum):
    """What a node is doing in the round that its status names."""

    WAITING = "waiting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class PlanPhase(str, enum.Enum):
    """What the whole job is doing."""

    GATHERING = "gathering"
    TRAINING = "training"
    FINISHED = "finished"
    FAILED = "failed"


class Failure(msgspec.Struct, frozen=True):
    """The first worker of a node that ended badly in a round. `what` is the end in words, without the worker's name."""

    rank: int
    host: str
    what: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} {self.what}"


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What one node says of itself; only that node writes it.

    `incarnation` tells two processes with one node id apart. `port` is free and held by the node for the store of the
    next round, should the store come to live there. `round` is the round that `phase` and `failure` speak of, 0 before
    the first.
    """

    node_id: str
    incarnation: str
    address: str
    port: int
    workers: int
    phase: NodePhase = NodePhase.WAITING
    round: int = 0
    failure: Failure | None = None


class Member(msgspec.Struct, frozen=True):
    """One node of a round. `first_rank` is the global rank of its local rank 0."""

    node_id: str
    incarnation: str
    node_rank: int
    workers: int
    first_rank: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the whole job should do now; only the coordinator writes it.

    Rounds count from 1. `restart_count` is the number of worker failures that were answered with a new round. `reason`
    is one plain sentence that says why the plan is as it is.
    """

    round: int = 0
    phase: PlanPhase = PlanPhase.GATHERING
    members: tuple[Member, ...] = ()
    store_address: str = ""
    store_port: int = 0
    restart_count: int = 0
    reason: str = "no node has reported yet"


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a plan that one node needs to start its workers."""

    round: int
    restart_count: int
    node_rank: int
    nodes: int
    workers: int
    first_rank: int
    world_size: int
    store_address: str
    store_port: int


def assignment(plan: Plan, status: NodeStatus) -> Assignment | None:
    """What `plan` asks of the node that wrote `status`, or None when it has no place in the round."""
    mine = [m for m in plan.members if (m.node_id, m.incarnation) == (status.node_id, status.incarnation)]
    if plan.phase is not PlanPhase.TRAINING or not mine:
        return None
    return Assignment(
        round=plan.round,
        restart_count=plan.restart_count,
        node_rank=mine[0].node_rank,
        nodes=len(plan.members),
        workers=mine[0].workers,
        first_rank=mine[0].first_rank,
        world_size=sum(member.workers for member in plan.members),
        store_address=plan.store_address,
        store_port=plan.store_port,
    )
