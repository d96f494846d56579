"""The plan of a running job, rebuilt from what its nodes say, for a coordinator that has no journal of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from dlrover_run.coordination.bounds import MAX_WORKERS
from dlrover_run.coordination.model import Member, NodeReport, Plan, PlanPhase, RankAssignment, RoundKey
from dlrover_run.coordination.reasons import Code

_UNKNOWN = "unknown"

Seated = dict[int, tuple[RankAssignment, NodeReport]]


def knows_a_round(report: NodeReport) -> bool:
    """Whether the node knows of a round of the job, so that the job has been running."""
    return latest_round(report) != RoundKey()


def latest_round(report: NodeReport) -> RoundKey:
    """The latest round that the node knows of."""
    return max(report.known_round, report.ranks.key) if report.ranks is not None else report.known_round


def recover_plan(fresh: Plan, statuses: Sequence[NodeReport], waited: bool) -> Plan | None:
    """The plan of the latest round that a node knows of; None while some who could say more are still to be heard.

    `waited` says that those who were not heard by now will not be waited for. Their places are then given to members
    that nobody is, so that they count as lost.
    """
    latest = max((latest_round(report) for report in statuses), default=RoundKey())
    seated: dict[RoundKey, Seated] = {}
    for report in statuses:
        if report.ranks is not None:
            seated.setdefault(report.ranks.key, {})[report.ranks.node_rank] = (report.ranks, report)
    found = seated.get(latest)
    if not waited and (found is None or len(found) < _any(found).nodes):
        return None
    if latest == RoundKey():
        return None
    adopted = msgspec.structs.replace(
        fresh,
        key=latest,
        restart_count=max(report.restart_count for report in statuses),
        reasons=(Code.RECOVERED(),),
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


def _any(found: Seated) -> RankAssignment:
    return next(seat for seat, _ in found.values())


def _members(found: Seated, any_seat: RankAssignment) -> Iterator[Member]:
    """The members in the order of their ranks. Nodes that were not heard are given the workers between those of their
    neighbours, so that every node that was heard keeps the ranks of its workers."""
    next_rank = 0
    for node_rank in range(any_seat.nodes):
        if node_rank in found:
            seat, report = found[node_rank]
            yield Member(report.node_id, report.incarnation, report.host, report.workers, report.role)
            next_rank = seat.first_rank + report.workers
        else:
            after = found.get(node_rank + 1)
            begin = after[0].first_rank if after is not None else next_rank
            if node_rank + 1 == any_seat.nodes:
                begin = any_seat.world_size
            workers = min(max(0, begin - next_rank), MAX_WORKERS)
            yield Member(f"unknown-{node_rank}", _UNKNOWN, "", workers)
            next_rank += workers
