"""Numbers that no node of ours says of itself, and that would cost a coordinator dearly."""

from __future__ import annotations

from dlrover_run.coordination.records import NodeStatus, Plan
from dlrover_run.coordination.rules import MOST_NODES

MAX_EPOCH = 2**62
"""A later epoch than any clock gives. A node may speak of a later one only where it is ours."""

MAX_ROUND = 2**32
"""More rounds than any job has. A node may speak of a later one only where the plan does."""

MAX_WORKERS = 100_000
"""More workers than any node has."""


def implausible(status: NodeStatus, plan: Plan) -> str | None:
    """A sentence about what is wrong with a status; None for one that a coordinator with this plan may hear."""
    keys = [status.heard]
    tasks = [status.computed.key] if status.computed is not None else []
    tasks += [status.linked.key] if status.linked is not None else []
    if status.seat is not None:
        keys.append(status.seat.key)
        if not status.seat.node_rank < status.seat.nodes <= MOST_NODES:
            return "a status speaks of a seat that no round has"
    last_epoch, last_round = max(MAX_EPOCH, plan.epoch), max(MAX_ROUND, plan.key.number)
    if not all(
        0 <= epoch <= last_epoch
        for epoch in (status.epoch, *(key.epoch for key in keys), *(task.epoch for task in tasks))
    ):
        return "a status speaks of an epoch that no coordinator has"
    if any(key.number > last_round for key in keys):
        return "a status speaks of a round that no job has"
    if any(task.number > max(MAX_ROUND, plan.checks) for task in tasks):
        return "a status speaks of a node check that no job has"
    if not 1 <= status.workers <= MAX_WORKERS:
        return f"a node has 1 to {MAX_WORKERS} workers, and this one says {status.workers}"
    return None
