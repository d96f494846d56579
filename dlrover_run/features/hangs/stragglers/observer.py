"""The search for stragglers among the nodes of a round: it sends each node its own."""

from __future__ import annotations

from collections.abc import Mapping

from dlrover_run.coordination.membership import Nodes
from dlrover_run.coordination.observer import Observation, Observer
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.round import NodeKey, RankAssignment
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds.ranks import rank_assignments
from dlrover_run.features.hangs.stragglers.finding import Straggler, find_stragglers
from dlrover_run.features.hangs.stragglers.model import StragglerAssignment, StragglerNodeReport, StragglerState
from dlrover_run.features.hangs.stragglers.shares import Shares


class StragglerObserver(Observer):
    """Compares the workers of all nodes of a round."""

    def __init__(self, rules: JobRules) -> None:
        pass

    def observe(self, plan: Plan, nodes: Nodes, now: float) -> Observation:
        before = StragglerState.get(plan.parts).stragglers
        found = find(plan, nodes)
        known = [one.rank for one in before]
        if found is None or [one.rank for one in found] == known:
            # Shares that only vary are no news, and nor is a cause that changes between two that are as large.
            return Observation()
        lines = tuple(one.text for one in found if one.rank not in known)
        return Observation(StragglerState(found), log_lines=lines)

    def orders(self, plan: Plan, ranks: Mapping[NodeKey, RankAssignment]) -> Mapping[NodeKey, StragglerAssignment]:
        """The stragglers of each node that has one."""
        stragglers = StragglerState.get(plan.parts).stragglers
        if not stragglers:
            return {}
        own = {key: tuple(one for one in stragglers if place.has_rank(one.rank)) for key, place in ranks.items()}
        return {key: StragglerAssignment(plan.key, found) for key, found in own.items() if found}


def find(plan: Plan, nodes: Nodes) -> tuple[Straggler, ...] | None:
    """The stragglers of the round that runs. None while that cannot be decided, because a node is away: what was found
    before holds."""
    if plan.phase is not PlanPhase.TRAINING:
        return ()
    assigned = rank_assignments(plan)
    workers: list[Shares] = []
    for member in plan.members:
        state = nodes.get(member.key)
        if state is None or not state.connected:
            return None
        part = StragglerNodeReport.find(state.report.parts) if state.report.in_round(plan.key) else None
        if part is None or len(part.shares) < member.workers:
            # It has just begun, or some of its workers have ended: the others do not train as before.
            return ()
        # Only its own ranks, whatever it reports.
        workers += (one for one in part.shares if assigned[member.key].has_rank(one.rank))
    known = {one.rank for one in StragglerState.get(plan.parts).stragglers}
    return find_stragglers(workers, known)


OBSERVER = StragglerObserver
