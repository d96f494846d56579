"""The plan of a running job, rebuilt from what its nodes say, for a coordinator that has no journal of it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dlrover_run.coordination.records import Member, NodeStatus, Plan, PlanPhase


def adopt(fresh: Plan, statuses: Sequence[NodeStatus], waited: bool) -> Plan | None:
    """The plan of the latest round that a node has a seat in; None while some of its nodes are still to be heard.

    `waited` says that those who were not heard by now will not be waited for: their places are given to members that
    nobody is, so that they count as lost.
    """
    seated = [(status.seat, status) for status in statuses if status.seat is not None]
    if not seated:
        return None
    latest = max(seat.key for seat, _ in seated)
    by_rank = {seat.node_rank: (seat, status) for seat, status in seated if seat.key == latest}
    seat, _ = next(iter(by_rank.values()))
    if len(by_rank) < seat.nodes and not waited:
        return None

    def member(rank: int) -> Member:
        if rank not in by_rank:
            return Member(f"unknown-{rank}", "unknown", f"the node with rank {rank}", 0)
        status = by_rank[rank][1]
        return Member(status.node_id, status.incarnation, status.host, status.workers, status.role)

    return msgspec.structs.replace(
        fresh,
        phase=PlanPhase.TRAINING,
        key=latest,
        members=tuple(member(rank) for rank in range(seat.nodes)),
        store_address=seat.store_address,
        store_port=seat.store_port,
        restart_count=seat.restart_count,
        reason="the job was running when its coordinator began",
    )
