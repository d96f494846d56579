"""The steps of the warm-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dlrover_run.coordination.decision import Deadline, DeadlineReason, Decision, update_plan
from dlrover_run.coordination.membership import Members, MemberState
from dlrover_run.coordination.model import OVER, Member, NodeKey, Plan, RankAssignment, Waiting
from dlrover_run.coordination.policy import Policy
from warm_up.rules import WarmUpAssignment, WarmUpProgress, WarmUpRules, WarmUpState
from warm_up.text import Code


class WarmUpPolicy(Policy):
    """Lets the nodes of each round warm up before it."""

    needs_gathering = True

    def has_started(self, plan: Plan) -> bool:
        """Whether there was a warm-up before."""
        return WarmUpState.get(plan.parts).count > 0

    def is_active(self, plan: Plan) -> bool:
        """Whether a warm-up runs."""
        return bool(WarmUpState.get(plan.parts).warming)

    def step(self, plan: Plan, members: Members, now: float) -> Decision:
        """End the warm-up once its time is over. Where nodes have no rounds, begin one for those that are cold."""
        state = WarmUpState.get(plan.parts)
        if not state.warming:
            begun = None if self.has_rounds else self.begin(plan, list(members.values()), (), now)
            return Decision(begun or plan)
        ends_at = state.since + WarmUpRules.get(self.rules.parts).seconds
        if now < ends_at:
            return Decision(plan, (Deadline(ends_at, DeadlineReason.POLICY),), holds=True)
        return Decision(_update(plan, now, warming=(), warm=(*state.warm, *state.warming)), log_lines=("warm",))

    def begin(self, plan: Plan, ranked: Sequence[MemberState], nodes: Sequence[MemberState], now: float) -> Plan | None:
        """Return the plan in which the nodes of the round that are not warm begin to warm up."""
        state = WarmUpState.get(plan.parts)
        cold = tuple(tuple(p.report.key) for p in ranked if tuple(p.report.key) not in state.warm)
        return _update(plan, now, count=state.count + 1, since=now, warming=cold) if cold else None

    def end_round(self, plan: Plan) -> Plan:
        """Return the plan in which all nodes are cold."""
        return _update(plan, plan.clock, warm=())

    def end_job(self, plan: Plan, now: float) -> Plan:
        """Return the plan without a warm-up."""
        return _update(plan, now, warming=()) if self.is_active(plan) else plan

    def expected(self, plan: Plan) -> list[Member]:
        """Return the nodes that warm up."""
        return [Member(*key, "", 0) for key in WarmUpState.get(plan.parts).warming]

    def recover(self, plan: Plan, members: Members) -> Plan:
        """Return the plan in which all members count as warm."""
        return _update(plan, plan.clock, warm=tuple(tuple(member.key) for member in plan.members))

    def tasks(self, plan: Plan, ranks: Mapping[NodeKey, RankAssignment]) -> Mapping[NodeKey, WarmUpAssignment]:
        """Return the warm-up, for the nodes that take part in it."""
        state = WarmUpState.get(plan.parts)
        if plan.phase in OVER:
            return {}
        return {NodeKey(*key): WarmUpAssignment(state.count) for key in (*state.warming, *state.warm)}

    def waiting(self, plan: Plan, members: Members, seconds: float | None, now: float) -> Waiting | None:
        """Return how many nodes warm up."""
        number = len(WarmUpState.get(plan.parts).warming)
        return Waiting((Code.WARMING(number=number),), seconds, (WarmUpProgress(number),)) if number else None


def _update(plan: Plan, now: float, **changes: Any) -> Plan:
    return update_plan(plan, now, part=msgspec.structs.replace(WarmUpState.get(plan.parts), **changes))


POLICY = WarmUpPolicy
