"""The health check as a policy: a round is formed of nodes that have passed a check. The steps are in `steps`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from dlrover_run.coordination.decision import Deadline, DeadlineReason, Decision
from dlrover_run.coordination.membership import Members, MemberState
from dlrover_run.coordination.model import OVER, Member, NodeKey, Plan, PlanPhase, RankAssignment, Waiting
from dlrover_run.coordination.policy import Policy
from dlrover_run.coordination.ranks import display_names
from dlrover_run.coordination.rules import JobRules
from dlrover_run.features.node_check.decision import steps, text
from dlrover_run.features.node_check.decision.model import (
    CheckKey,
    HealthAssignment,
    HealthProgress,
    HealthState,
    HealthStatus,
    LinkRow,
    NodeHealth,
)
from dlrover_run.features.node_check.decision.round import (
    asked,
    awaited,
    check_status,
    health_of,
    key_of,
    state_of,
    tasks,
    without_check,
)
from dlrover_run.features.node_check.decision.rules import CHECK_ALWAYS, HealthRules
from dlrover_run.words.reasons import Reason, Reasons

MAX_DISMISSALS = 300
"""Characters of the causes of dismissals that waiting nodes are shown."""


class HealthPolicy(Policy):
    """Checks nodes before they train, once or before each round."""

    watches_spares = True

    def __init__(self, rules: JobRules) -> None:
        super().__init__(rules)
        self.limits = HealthRules.get(rules.parts)
        self.needs_gathering = self.limits.check == CHECK_ALWAYS

    def refresh(self, plan: Plan, members: Members, now: float) -> Decision:
        return steps.mark_unchecked(steps.prune(plan, members, now), members, now)

    def has_started(self, plan: Plan) -> bool:
        return state_of(plan).check_count > 0

    def is_active(self, plan: Plan) -> bool:
        return state_of(plan).check is not None

    def eligible(self, plan: Plan, members: Members) -> list[MemberState]:
        return steps.eligible_nodes(plan, members)

    def has_removed(self, plan: Plan, members: Members) -> bool:
        return any(one.dismissed and key_of(one) in members for one in state_of(plan).health)

    def stop_watching(self, plan: Plan, now: float) -> Plan:
        # Its nodes are checked with the others.
        check = state_of(plan).check
        return steps.update(plan, now, check=None) if check is not None and check.during_training else plan

    def step(self, plan: Plan, members: Members, now: float) -> Decision:
        if not self.is_active(plan):
            return Decision(plan)
        following = steps.step(self.limits, plan, members, now)
        return following._replace(holds=self.is_active(following.plan))

    def admit(self, plan: Plan, nodes: list[MemberState], now: float) -> list[MemberState]:
        """The nodes without those that still compute, if enough are left and there was a round or a check before."""
        if steps.computes_anew(self.limits, plan) or not (plan.key.number or state_of(plan).check_count):
            return nodes
        waited_for = {p.report.key for p in steps.computing(self.limits, plan, nodes, now)}
        others = [p for p in nodes if p.report.key not in waited_for]
        return others if self.rules.size(len(others)) else nodes

    def hold_for(self, plan: Plan, ranked: Sequence[MemberState], now: float) -> Deadline | None:
        if steps.computes_anew(self.limits, plan):
            return None
        waited_for = steps.computing(self.limits, plan, ranked, now)
        known_at = max((steps.computes_until(self.limits, p) for p in waited_for), default=None)
        return None if known_at is None else Deadline(known_at, DeadlineReason.POLICY)

    def begin(self, plan: Plan, ranked: Sequence[MemberState], nodes: Sequence[MemberState], now: float) -> Plan | None:
        return steps.begin(self.limits, plan, ranked, nodes, now)

    def end_round(self, plan: Plan) -> Plan:
        if not self.needs_gathering:
            return plan
        # A dismissed node stays dismissed, and a node that takes no part in checks takes none in the next one.
        kept = tuple(one for one in state_of(plan).health if one.dismissed or one.status is HealthStatus.UNCHECKED)
        return steps.with_state(plan, health=kept, links=())

    def watch(self, plan: Plan, members: Members, now: float) -> Decision:
        return steps.check_during_training(self.limits, plan, members, now)

    def admitted(self, plan: Plan, nodes: Sequence[MemberState]) -> list[MemberState]:
        passed = {key_of(one) for one in state_of(plan).health if not one.dismissed}
        return [p for p in nodes if p.report.key in passed]

    def end_job(self, plan: Plan, now: float) -> Plan:
        return steps.update(plan, now, check=None) if self.is_active(plan) else plan

    def take_over(self, plan: Plan) -> Plan:
        """The plan in which the round of a check that runs begins again: some nodes may have received their task long
        before the others do, and would have waited for peers in vain."""
        check = state_of(plan).check
        if check is None:
            return plan
        key = CheckKey(plan.epoch, check.key.number, check.key.round)
        since = plan.since if check.during_training else steps.waiting_since(plan, check, plan.clock)
        again = msgspec.structs.replace(check, key=key, since=plan.clock)
        return steps.with_state(msgspec.structs.replace(plan, since=since), check=again)

    def expected(self, plan: Plan) -> list[Member]:
        """The nodes of a check that runs, and those that have passed one. Dismissed nodes are not waited for."""
        state = state_of(plan)
        checked = state.check.nodes if state.check is not None else ()
        nodes = [Member(node.node_id, node.incarnation, node.host, node.workers) for node in checked]
        passed = (one for one in state.health if not one.dismissed)
        return [*nodes, *(Member(one.node_id, one.incarnation, one.host, 0) for one in passed)]

    def recover(self, plan: Plan, members: Members) -> Plan:
        """The plan in which all members count as checked: they were, before they had ranks. Nodes that take no part in
        checks are known by that."""
        checked = tuple(
            health_of(member, HealthStatus.PASSED)
            for member in plan.members
            if (p := members.get(member.key)) is not None and not without_check(p)
        )
        return steps.with_state(plan, health=checked)

    def tasks(self, plan: Plan, ranks: Mapping[NodeKey, RankAssignment]) -> Mapping[NodeKey, HealthAssignment]:
        """The task, the result, and for rank 0 the table of all results."""
        state = state_of(plan)
        if state.check is None and not state.health:
            return {}
        given = {} if state.check is None or plan.phase in OVER else tasks(self.limits, state.check)
        results = {key_of(one): one for one in state.health}
        found = {
            key: HealthAssignment(check_task=given.get(key), health=results.get(key))
            for key in dict.fromkeys([*given, *results])
        }
        if ranks:
            table, links = _tables(plan, state, results)
            first = plan.members[0].key
            found[first] = msgspec.structs.replace(
                found.get(first, HealthAssignment()), health_table=table, link_table=links
            )
        return found

    def waiting(self, plan: Plan, members: Members, seconds: float | None, now: float) -> Waiting | None:
        """Which nodes a check, or its begin, waits for, while no round runs."""
        if plan.phase is PlanPhase.TRAINING:
            return None
        check = state_of(plan).check
        if check is not None:
            waited_for = [check.nodes[place].host for place in awaited(check, members, now)]
            reasons = text.answers(check, waited_for, len(asked(check, members, now)))
            rows = text.shown(check_status(check, members), text.share_of(len(members)))
            return Waiting(reasons, seconds, (HealthProgress(rows),))
        nodes = self.eligible(plan, members)
        if self.rules.size(len(nodes)) and not steps.computes_anew(self.limits, plan):
            silent = steps.computing(self.limits, plan, nodes, now)
            if silent:
                return Waiting(text.not_computed(display_names(plan, silent), len(nodes)), seconds)
        return None

    def removals(self, plan: Plan, members: Members) -> Reasons:
        """The dismissed nodes. A node that is gone is shown only while the others wait for one in its place."""
        health = state_of(plan).health
        shown = (one for one in health if plan.key.number == 0 or key_of(one) in members)
        return text.dismissals([one for one in shown if one.dismissed], MAX_DISMISSALS)

    def watch_reason(self, deadline: Deadline, joining: bool) -> Reason | None:
        return text.HealthCode.PASSED_JOIN() if joining else text.HealthCode.CHECKED_DURING_TRAINING()


def _tables(
    plan: Plan, state: HealthState, results: Mapping[NodeKey, NodeHealth]
) -> tuple[tuple[NodeHealth, ...], tuple[LinkRow, ...]]:
    """The results that a user is shown, in the order of ranks, and the links between those nodes."""
    ranked = [member.key for member in plan.members if member.key in results]
    table = text.shown([results[key] for key in dict.fromkeys([*ranked, *results])])
    places = {key_of(one): place for place, one in enumerate(table)}
    links = []
    for link in state.links:
        ends = [places.get(key_of(state.health[end])) for end in (link.one, link.other)]
        known = sorted(end for end in ends if end is not None)
        if len(known) == 2:
            links.append(msgspec.structs.replace(link, one=known[0], other=known[1]))
    return table, tuple(links)


POLICY = HealthPolicy
