"""The plan of a running job, rebuilt from what its nodes report, for a coordinator that has no journal of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from dlrover_run.coordination.membership import Nodes
from dlrover_run.coordination.records.bounds import MAX_WORKERS
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import Member, RankAssignment, RoundKey
from dlrover_run.words.reasons import Code

_UNKNOWN = "unknown"

RankedNodes = dict[int, tuple[RankAssignment, NodeReport]]


def latest_round(report: NodeReport) -> RoundKey:
    return max(report.known_round, report.ranks.key) if report.ranks is not None else report.known_round


def connected_reports(nodes: Nodes) -> list[NodeReport]:
    """The reports from which a plan is rebuilt."""
    return [state.report for state in nodes.values() if state.connected]


def recover_plan(empty_plan: Plan, reports: Sequence[NodeReport], grace_over: bool) -> Plan | None:
    """The plan of the latest round that a node knows of; None until a report for every rank of that round has arrived.

    With `grace_over`, nodes that have not reported are not awaited any more. Each of their ranks gets a placeholder
    member `unknown-K`, which the next decision treats as a lost node.
    """
    latest = max((latest_round(report) for report in reports), default=RoundKey())
    by_round: dict[RoundKey, RankedNodes] = {}
    for report in reports:
        if report.ranks is not None:
            by_round.setdefault(report.ranks.key, {})[report.ranks.node_rank] = (report.ranks, report)
    found = by_round.get(latest)
    if not grace_over and (found is None or len(found) < _any(found).nodes):
        return None
    if latest == RoundKey():
        return None
    recovered = msgspec.structs.replace(
        empty_plan,
        key=latest,
        restart_count=max(report.restart_count for report in reports),
        reasons=(Code.RECOVERED(),),
        saves=any(report.saves for report in reports),
    )
    if not by_round:
        return recovered
    # If no node has ranks in the latest round, it ended or was never received; the ranks of the one before are kept.
    found = by_round[max(by_round)]
    ranks = _any(found)
    return msgspec.structs.replace(
        recovered,
        phase=PlanPhase.TRAINING if ranks.key == latest else PlanPhase.GATHERING,
        members=tuple(_members(found, ranks)),
        store_address=ranks.store_address,
        store_port=ranks.store_port,
    )


def _any(found: RankedNodes) -> RankAssignment:
    return next(ranks for ranks, _ in found.values())


def _members(found: RankedNodes, any_ranks: RankAssignment) -> Iterator[Member]:
    """The members in the order of their ranks. Nodes that have not reported are given the workers between those of
    their neighbours, so that every node that has reported keeps the ranks of its workers."""
    next_rank = 0
    for node_rank in range(any_ranks.nodes):
        if node_rank in found:
            ranks, report = found[node_rank]
            yield report.member
            next_rank = ranks.first_rank + report.workers
        else:
            after = found.get(node_rank + 1)
            begin = after[0].first_rank if after is not None else next_rank
            if node_rank + 1 == any_ranks.nodes:
                begin = any_ranks.world_size
            workers = min(max(0, begin - next_rank), MAX_WORKERS)
            yield Member(f"unknown-{node_rank}", _UNKNOWN, "", workers)
            next_rank += workers
