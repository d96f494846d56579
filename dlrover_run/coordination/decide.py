"""The whole of coordination: statuses go in, the next plan comes out.

Pure: no clock, no socket, no thread. Deciding twice on the same statuses gives the same plan, so it may be called as
often as one likes and never loses or repeats a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dlrover_run.coordination.records import Failure, Member, NodePhase, NodeStatus, Plan, PlanPhase


@dataclass(frozen=True)
class Rules:
    """What the user fixed: when a round is complete, how many restarts there may be, and a store address given by hand.

    `store` is (address, port) when flags named it, else None: then the node with rank 0 offers the port that it holds.
    """

    nodes: int = 1
    max_restarts: int = 0
    store: tuple[str, int] | None = None


def decide(rules: Rules, plan: Plan, statuses: Sequence[NodeStatus]) -> Plan:
    """The plan that follows from `plan` once `statuses` are known; `plan` itself when nothing has to change.

    The statuses are in the order of the node ranks.
    """
    if plan.phase in (PlanPhase.FINISHED, PlanPhase.FAILED):
        return plan
    if plan.phase is PlanPhase.GATHERING:
        if len(statuses) < rules.nodes:
            return msgspec.structs.replace(plan, reason=f"{len(statuses)} of {rules.nodes} nodes have reported")
        return _next_round(rules, plan, statuses, plan.restart_count, f"all {rules.nodes} nodes are here")

    current = [status for status in statuses if status.round == plan.round]
    failure = _first_failure(current)
    if failure is not None:
        if plan.restart_count >= rules.max_restarts:
            return msgspec.structs.replace(plan, phase=PlanPhase.FAILED, reason=str(failure))
        return _next_round(rules, plan, statuses, plan.restart_count + 1, str(failure))
    if len(current) == len(plan.members) and all(status.phase is NodePhase.SUCCEEDED for status in current):
        return msgspec.structs.replace(plan, phase=PlanPhase.FINISHED, reason="every worker succeeded")
    return plan


def _first_failure(statuses: Sequence[NodeStatus]) -> Failure | None:
    failures = [status.failure for status in statuses if status.phase is NodePhase.FAILED and status.failure]
    return failures[0] if failures else None


def _next_round(rules: Rules, plan: Plan, statuses: Sequence[NodeStatus], restart_count: int, reason: str) -> Plan:
    members = []
    first_rank = 0
    for node_rank, status in enumerate(statuses):
        members.append(Member(status.node_id, status.incarnation, node_rank, status.workers, first_rank))
        first_rank += status.workers
    # A fresh port for every round: workers of an old round can then never meet workers of a new one. A store that the
    # user placed by hand keeps its port; it is fresh all the same, because it lives in the worker with rank 0 and dies
    # with it.
    address, port = rules.store or (statuses[0].address, statuses[0].port)
    return Plan(
        round=plan.round + 1,
        phase=PlanPhase.TRAINING,
        members=tuple(members),
        store_address=address,
        store_port=port,
        restart_count=restart_count,
        reason=reason,
    )
