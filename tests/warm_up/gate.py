"""The steps of the warm-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from dlrover_run.coordination.decision import Deadline, DeadlineReason, seconds_left, update_plan
from dlrover_run.coordination.gate import Choose, OpenGate, Permit, Step
from dlrover_run.coordination.membership import KnownNode, Nodes
from dlrover_run.coordination.records.assignment import Waiting
from dlrover_run.coordination.records.plan import OVER, Plan
from dlrover_run.coordination.records.round import NodeKey, RankAssignment
from warm_up.rules import WarmUpAssignment, WarmUpProgress, WarmUpRules, WarmUpState
from warm_up.text import Code


class WarmUpGate(OpenGate):
    """Lets the nodes of each round warm up before it."""

    name = "warm_up"

    def between(self, plan: Plan, nodes: Nodes, now: float) -> Step:
        """End the warm-up once its time is over."""
        state = WarmUpState.get(plan.parts)
        if not state.warming:
            return Step(plan)
        ends_at = state.since + WarmUpRules.get(self.rules.parts).seconds
        if now < ends_at:
            wait = partial(_wait, len(state.warming))
            return Step(plan, (Deadline(ends_at, DeadlineReason.FEATURE),), holds=True, wait=wait)
        return Step(_update(plan, now, warming=(), warm=(*state.warm, *state.warming)), log_lines=("warm",))

    def permit(self, plan: Plan, nodes: Sequence[KnownNode], choose: Choose, now: float) -> Permit:
        """Return the plan in which the nodes of the round that are not warm begin to warm up."""
        ranked, state = choose(nodes), WarmUpState.get(plan.parts)
        cold = tuple(tuple(p.report.key) for p in ranked if tuple(p.report.key) not in state.warm)
        begun = _update(plan, now, count=state.count + 1, since=now, warming=cold) if cold else None
        return Permit(ranked, begun=begun)

    def end_round(self, plan: Plan) -> Plan:
        """Return the plan in which all nodes are cold."""
        return _update(plan, plan.clock, warm=())

    def recovered(self, plan: Plan, nodes: Nodes) -> WarmUpState:
        """Return the part in which all members count as warm."""
        return WarmUpState(warm=tuple(tuple(member.key) for member in plan.members))

    def orders(self, plan: Plan, ranks: Mapping[NodeKey, RankAssignment]) -> Mapping[NodeKey, WarmUpAssignment]:
        """Return the warm-up, for the nodes that take part in it."""
        state = WarmUpState.get(plan.parts)
        if plan.phase in OVER:
            return {}
        return {NodeKey(*key): WarmUpAssignment(state.count) for key in (*state.warming, *state.warm)}


def _wait(number: int, deadlines: Sequence[Deadline], now: float) -> Waiting:
    """Return how many nodes warm up."""
    return Waiting((Code.WARMING(number=number),), seconds_left(deadlines, now), (WarmUpProgress(number),))


def _update(plan: Plan, now: float, **changes: Any) -> Plan:
    return update_plan(plan, now, part=msgspec.structs.replace(WarmUpState.get(plan.parts), **changes))


GATE = WarmUpGate
