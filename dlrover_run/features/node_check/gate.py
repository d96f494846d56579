"""The node check as a gate: a round is formed of nodes that have passed a check. The steps are in `steps`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from dlrover_run.coordination.decision import Deadline, DeadlineReason, seconds_left
from dlrover_run.coordination.gate import Choose, Gate, Permit, Step
from dlrover_run.coordination.membership import KnownNode, Nodes
from dlrover_run.coordination.records.assignment import Waiting
from dlrover_run.coordination.records.plan import OVER, Plan
from dlrover_run.coordination.records.round import Member, NodeKey, RankAssignment
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds.ranks import display_names
from dlrover_run.features.node_check import text
from dlrover_run.features.node_check.decision import steps
from dlrover_run.features.node_check.decision.model import (
    CheckKey,
    HealthStatus,
    LinkRow,
    NodeCheckAssignment,
    NodeCheckProgress,
    NodeCheckState,
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
from dlrover_run.features.node_check.rules import CHECK_ALWAYS, NodeCheckRules
from dlrover_run.words.reasons import Reasons

MAX_DISMISSALS = 300
"""Characters of the causes of dismissals that waiting nodes are shown."""


class NodeCheckGate(Gate):
    """Checks nodes before they train, once or before each round."""

    name = "node_check"

    def __init__(self, rules: JobRules) -> None:
        self.rules = rules
        self.limits = NodeCheckRules.get(rules.parts)

    def healthy(self, plan: Plan, nodes: Nodes) -> list[KnownNode]:
        return steps.eligible_nodes(plan, nodes)

    def between(self, plan: Plan, nodes: Nodes, now: float) -> Step:
        noted = steps.note_nodes(plan, nodes, now)
        plan, wait = noted.plan, partial(self._wait, dict(nodes), now)
        check = state_of(plan).check
        if check is None or check.during_training:
            # One beside training goes on beside the next round. If something has to be checked before that, `permit`
            # begins another check in its place, of all.
            return noted._replace(plan=plan, wait=partial(wait, plan))
        step = steps.step(self.limits, plan, nodes, now)
        return step._replace(
            log_lines=noted.log_lines + step.log_lines,
            holds=state_of(step.plan).check is not None,
            wait=partial(wait, step.plan),
        )

    def permit(self, plan: Plan, nodes: Sequence[KnownNode], choose: Choose, now: float) -> Permit:
        nodes = self._without_computing(plan, nodes, now)
        ranked = choose(nodes)
        if not steps.computes_anew(self.limits, plan):
            waited_for = steps.computing(self.limits, plan, ranked, now)
            known_at = max((steps.computes_until(self.limits, p) for p in waited_for), default=None)
            if known_at is not None:
                return Permit(until=Deadline(known_at, DeadlineReason.FEATURE))
        return Permit(ranked, begun=steps.begin(self.limits, plan, ranked, nodes, now))

    def during(self, plan: Plan, nodes: Nodes, now: float) -> Step:
        noted = steps.note_nodes(plan, nodes, now)
        plan, check = noted.plan, state_of(noted.plan).check
        if any(member.done or _has_succeeded(member, plan, nodes) for member in plan.members):
            # No node joins any more.
            return noted if check is None else noted._replace(plan=steps.update(plan, now, check=None))
        if check is None and len(nodes) == len(plan.members):
            return noted
        step = steps.check_during_training(self.limits, plan, nodes, now)
        spare = (text.NodeCheckCode.CHECKED_DURING_TRAINING(), text.NodeCheckCode.PASSED_JOIN())
        return step._replace(log_lines=noted.log_lines + step.log_lines, spare=spare)

    def joins(self, plan: Plan, nodes: Sequence[KnownNode]) -> list[KnownNode]:
        passed = {key_of(one) for one in state_of(plan).health if not one.dismissed}
        return [p for p in nodes if p.report.key in passed]

    def end_round(self, plan: Plan) -> Plan:
        if self.limits.check != CHECK_ALWAYS:
            return plan
        # A dismissed node stays dismissed, and a node that takes no part in checks takes none in the next one.
        kept = tuple(one for one in state_of(plan).health if one.dismissed or one.status is HealthStatus.UNCHECKED)
        return steps.with_state(plan, health=kept, links=())

    def removals(self, plan: Plan, nodes: Nodes) -> Reasons:
        """The dismissed nodes. A node that is gone is shown only while the others wait for one in its place."""
        health = state_of(plan).health
        shown = (one for one in health if plan.key.number == 0 or key_of(one) in nodes)
        return text.dismissals([one for one in shown if one.dismissed], MAX_DISMISSALS)

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

    def recovered(self, plan: Plan, nodes: Nodes) -> NodeCheckState:
        """All members count as checked: they were, before they had ranks. Nodes that take no part in checks are known
        by that."""
        checked = tuple(
            health_of(member, HealthStatus.PASSED)
            for member in plan.members
            if (p := nodes.get(member.key)) is not None and not without_check(p)
        )
        return msgspec.structs.replace(state_of(plan), health=checked)

    def orders(self, plan: Plan, ranks: Mapping[NodeKey, RankAssignment]) -> Mapping[NodeKey, NodeCheckAssignment]:
        """The task, the result, and for rank 0 the table of all results."""
        state = state_of(plan)
        if state.check is None and not state.health:
            return {}
        given = {} if state.check is None or plan.phase in OVER else tasks(self.limits, state.check)
        results = {key_of(one): one for one in state.health}
        found = {
            key: NodeCheckAssignment(check_task=given.get(key), health=results.get(key))
            for key in dict.fromkeys([*given, *results])
        }
        if ranks:
            table, links = _tables(plan, state, results)
            first = plan.members[0].key
            found[first] = msgspec.structs.replace(
                found.get(first, NodeCheckAssignment()), health_table=table, link_table=links
            )
        return found

    def _without_computing(self, plan: Plan, nodes: Sequence[KnownNode], now: float) -> Sequence[KnownNode]:
        """The nodes without those that still compute, if enough are left and there was a round or a check before."""
        if steps.computes_anew(self.limits, plan) or not (plan.key.number or state_of(plan).check_count):
            return nodes
        waited_for = {p.report.key for p in steps.computing(self.limits, plan, nodes, now)}
        others = [p for p in nodes if p.report.key not in waited_for]
        return others if self.rules.size(len(others)) else nodes

    def _wait(
        self, nodes: Nodes, found_at: float, plan: Plan, deadlines: Sequence[Deadline], now: float
    ) -> Waiting | None:
        """Which nodes a check, or its begin, waits for: the `Wait` of `between`."""
        seconds, check = seconds_left(deadlines, now), state_of(plan).check
        if check is not None and not check.during_training:
            waited_for = [check.nodes[place].host for place in awaited(check, nodes, found_at)]
            reasons = text.answers(check, waited_for, len(asked(check, nodes, found_at)))
            rows = text.shown(check_status(check, nodes), text.share_of(len(nodes)))
            return Waiting(reasons, seconds, (NodeCheckProgress(rows),))
        healthy = self.healthy(plan, nodes)
        if self.rules.size(len(healthy)) and not steps.computes_anew(self.limits, plan):
            silent = steps.computing(self.limits, plan, healthy, found_at)
            if silent:
                return Waiting(text.not_computed(display_names(plan, silent), len(healthy)), seconds)
        return None


def _has_succeeded(member: Member, plan: Plan, nodes: Nodes) -> bool:
    state = nodes.get(member.key)
    return state is not None and state.succeeded_in(plan.key)


def _tables(
    plan: Plan, state: NodeCheckState, results: Mapping[NodeKey, NodeHealth]
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


GATE = NodeCheckGate
