"""The plan of a running job, rebuilt from what its nodes say, for a coordinator that has no journal of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from dlrover_run.coordination.bounds import MAX_WORKERS
from dlrover_run.coordination.check_records import Checkup, Verdict
from dlrover_run.coordination.presence import Present
from dlrover_run.coordination.records import Member, NodeStatus, Plan, PlanPhase, RoundKey, Seat

_UNKNOWN = "unknown"

Seated = dict[int, tuple[Seat, NodeStatus]]


def belongs_to_a_round(status: NodeStatus) -> bool:
    """Whether the node knows of a round of the job, so that the job has been running."""
    return latest_round(status) != RoundKey()


def latest_round(status: NodeStatus) -> RoundKey:
    """The latest round that the node knows of."""
    return max(status.heard, status.seat.key) if status.seat is not None else status.heard


def adopt(fresh: Plan, statuses: Sequence[NodeStatus], waited: bool) -> Plan | None:
    """The plan of the latest round that a node knows of; None while some who could say more are still to be heard.

    `waited` says that those who were not heard by now will not be waited for. Their places are then given to members
    that nobody is, so that they count as lost.
    """
    latest = max((latest_round(status) for status in statuses), default=RoundKey())
    seated: dict[RoundKey, Seated] = {}
    for status in statuses:
        if status.seat is not None:
            seated.setdefault(status.seat.key, {})[status.seat.node_rank] = (status.seat, status)
    found = seated.get(latest)
    if not waited and (found is None or len(found) < _any(found).nodes):
        return None
    if latest == RoundKey():
        return None
    adopted = msgspec.structs.replace(
        fresh,
        key=latest,
        restart_count=max(status.restart_count for status in statuses),
        reason="the job was running when its coordinator began",
    )
    if not seated:
        return adopted
    # Where the latest round has no node, it ended or was never told; the ranks of the one before are kept.
    found = seated[max(seated)]
    seat = _any(found)
    return msgspec.structs.replace(
        adopted,
        phase=PlanPhase.TRAINING if seat.key == latest else PlanPhase.GATHERING,
        members=tuple(_members(found, seat)),
        store_address=seat.store_address,
        store_port=seat.store_port,
    )


def vouch(plan: Plan, present: Present) -> Plan:
    """The plan in which all members count as checked: they were, before they had their seats. Those who take no part in
    checks are known by that."""
    checked = tuple(
        Checkup(node_id=member.node_id, incarnation=member.incarnation, host=member.host, verdict=Verdict.PASSED)
        for member in plan.members
        if (p := present.get(member.key)) is not None and not p.unaware_of_checks
    )
    return msgspec.structs.replace(plan, checked=checked)


def _any(found: Seated) -> Seat:
    return next(seat for seat, _ in found.values())


def _members(found: Seated, any_seat: Seat) -> Iterator[Member]:
    """The members in the order of their ranks. Nodes that were not heard are given the workers between those of their
    neighbours, so that every node that was heard keeps the ranks of its workers."""
    next_rank = 0
    for node_rank in range(any_seat.nodes):
        if node_rank in found:
            seat, status = found[node_rank]
            yield Member(status.node_id, status.incarnation, status.host, status.workers, status.role)
            next_rank = seat.first_rank + status.workers
        else:
            after = found.get(node_rank + 1)
            begin = after[0].first_rank if after is not None else next_rank
            if node_rank + 1 == any_seat.nodes:
                begin = any_seat.world_size
            workers = min(max(0, begin - next_rank), MAX_WORKERS)
            yield Member(f"unknown-{node_rank}", _UNKNOWN, "", workers)
            next_rank += workers
