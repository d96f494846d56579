"""Ends the round of a job when its first node reports a save. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from dlrover_run.coordination.membership import Nodes
from dlrover_run.coordination.observer import Observation, Observer
from dlrover_run.coordination.records.assignment import AssignmentPart
from dlrover_run.coordination.records.plan import Plan
from dlrover_run.coordination.records.round import NodeKey, RankAssignment
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.reload.model import ReloadReport, ReloadState


class ReloadObserver(Observer):
    """All nodes are on one machine and see the same files, so the node with rank 0 reports for all of them: one save is
    one restart."""

    def __init__(self, rules: JobRules) -> None:
        pass

    def observe(self, plan: Plan, nodes: Nodes, now: float) -> Observation:
        state = ReloadState.get(plan.parts)
        first = nodes.get(plan.members[0].key) if plan.members else None
        report = ReloadReport() if first is None else ReloadReport.get(first.report.parts)
        if state.key != plan.key:
            # The workers of this round start now: they read what was saved before.
            new = ReloadState(plan.key, report.token)
        elif report.token == state.seen:
            new = state
        else:
            new = replace(state, seen=report.token, due=report.reasons)
        is_first = ReloadState.find(plan.parts) is None
        return Observation(new if is_first or new != state else None)

    def orders(self, plan: Plan, ranks: Mapping[NodeKey, RankAssignment]) -> Mapping[NodeKey, AssignmentPart]:
        return {}

    def recovered(self, plan: Plan, nodes: Nodes) -> ReloadState:
        """The round that runs. A token that it reports counts as seen: a save in the moment of a takeover is lost."""
        first = nodes.get(plan.members[0].key) if plan.members else None
        return ReloadState(plan.key, "" if first is None else ReloadReport.get(first.report.parts).token)


OBSERVER = ReloadObserver
