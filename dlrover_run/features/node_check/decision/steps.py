"""The steps of a node check inside `decide`: which nodes are checked, what each round found, and what follows.

A check is in the plan from its begin to its end, so a successor continues it. What a node computes before it has a task
counts once, at the begin of its first check; where nodes are checked before each round all compute again, by task, once
there has been a round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from dlrover_run.coordination.decision import Deadline, DeadlineReason, deadline_if, update_plan
from dlrover_run.coordination.gate import Step
from dlrover_run.coordination.membership import KnownNode, Nodes
from dlrover_run.coordination.records.plan import Plan
from dlrover_run.features.node_check import text
from dlrover_run.features.node_check.decision.diagnosis import Diagnosis, diagnose
from dlrover_run.features.node_check.decision.model import (
    CheckedNode,
    CheckKey,
    ComputeFact,
    HealthStatus,
    NodeCheck,
    NodeCheckState,
    NodeHealth,
)
from dlrover_run.features.node_check.decision.pairing import MAX_ROUNDS, RoundTasks, first_round, next_round
from dlrover_run.features.node_check.decision.round import (
    CHECK_MARGIN,
    add_facts,
    awaited,
    computed_fact,
    health_of,
    key_of,
    report_of,
    state_of,
    without_check,
)
from dlrover_run.features.node_check.rules import CHECK_ALWAYS, NodeCheckRules
from dlrover_run.words.reasons import chain, render

WITHOUT_CHECK = "it was started without --network-check"
"""Why a node takes no part in checks."""

MAX_REMEMBERED = 16
"""Dismissed nodes that are remembered though they are gone, the last ones: one that comes back is still dismissed. A
node leaves as soon as it receives its dismissal, so hardly one ever comes back."""


def update(plan: Plan, now: float, **changes: Any) -> Plan:
    """The plan with those changes of it and of the state of the node check, written at job time `now`."""
    own = {name: changes.pop(name) for name in NodeCheckState.__struct_fields__ if name in changes}
    return update_plan(plan, now, part=msgspec.structs.replace(state_of(plan), **own), **changes)


def with_state(plan: Plan, **changes: Any) -> Plan:
    """The plan with those changes of the state of the node check, and the time at which it was written."""
    return update(plan, plan.clock, **changes)


def eligible_nodes(plan: Plan, nodes: Nodes) -> list[KnownNode]:
    """The nodes that may have ranks in a later round: those that can train and that no check has dismissed."""
    alive = [p for p in nodes.values() if p.is_available]
    dismissed = {key_of(node_health) for node_health in state_of(plan).health if node_health.dismissed}
    return [p for p in alive if p.report.key not in dismissed]


def note_nodes(plan: Plan, nodes: Nodes, now: float) -> Step:
    """The plan without what is known of nodes that are gone, and with what is known at once of nodes that came."""
    return mark_unchecked(prune(plan, nodes, now), nodes, now)


def mark_unchecked(plan: Plan, nodes: Nodes, now: float) -> Step:
    """The plan in which nodes that take no part in checks are marked as such, so that no check waits for them."""
    known = {key_of(node_health) for node_health in state_of(plan).health}
    new = [p.report for p in nodes.values() if p.is_available and without_check(p) and p.report.key not in known]
    if not new:
        return Step(plan)
    unchecked = (health_of(report, HealthStatus.UNCHECKED, reason=WITHOUT_CHECK) for report in new)
    lines = tuple(f"warning: {report.host} was not checked: {WITHOUT_CHECK}" for report in new)
    return Step(update(plan, now, health=(*state_of(plan).health, *unchecked)), (), lines)


def prune(plan: Plan, nodes: Nodes, now: float) -> Plan:
    """The plan without the results of nodes that are gone, except those that may not come back."""
    state = state_of(plan)
    gone = [place for place, node_health in enumerate(state.health) if key_of(node_health) not in nodes]
    remembered = [place for place in gone if state.health[place].dismissed][-MAX_REMEMBERED:]
    if len(gone) == len(remembered):
        return plan
    dropped = {*gone} - {*remembered}
    kept = [place for place in range(len(state.health)) if place not in dropped]
    places = {old: new for new, old in enumerate(kept)}
    links = tuple(
        msgspec.structs.replace(link, one=places[link.one], other=places[link.other])
        for link in state.links
        if link.one in places and link.other in places
    )
    return update(plan, now, health=tuple(state.health[place] for place in kept), links=links)


def computing(rules: NodeCheckRules, plan: Plan, alive: Iterable[KnownNode], now: float) -> list[KnownNode]:
    """The nodes that a check waits for: they are to be checked, and still have time for their first measurement."""
    known = {key_of(node_health) for node_health in state_of(plan).health}
    return [
        p
        for p in alive
        if report_of(p).compute_result is None and p.report.key not in known and now < computes_until(rules, p)
    ]


def begin(
    rules: NodeCheckRules, plan: Plan, ranked: Sequence[KnownNode], spares: Iterable[KnownNode], now: float
) -> Plan | None:
    """The plan with a check of the nodes that would have ranks in a round formed now, in that order, and of the
    `spares` that have computed; None when all nodes with ranks are checked."""
    known = {key_of(node_health) for node_health in state_of(plan).health}
    if all(p.report.key in known for p in ranked):
        return None
    taken = known.union(p.report.key for p in ranked)
    more = [p for p in spares if p.report.key not in taken]
    waited_for = {p.report.key for p in computing(rules, plan, more, now)}
    nodes = [*ranked, *(p for p in more if p.report.key not in waited_for)]
    check = _new_check(rules, plan, nodes, now, anew=computes_anew(rules, plan))
    tasks = first_round(check, bool(rules.measure_links), rules.straggler_threshold)
    check = msgspec.structs.replace(check, compute=tasks.compute, groups=tasks.groups)
    # A node that knows of a later round, from a predecessor whose journal is not there, takes no task of an earlier
    # one.
    key = max(plan.key, *(p.report.known_round for p in nodes))
    return update(plan, now, key=key, check=check, check_count=check.key.number, reasons=text.checking(check))


def step(rules: NodeCheckRules, plan: Plan, nodes: Nodes, now: float) -> Step:
    """Continue the plan's check as far as the results that were reported allow; at its end the plan has no check."""
    lines: tuple[str, ...] = ()
    while (check := state_of(plan).check) is not None:
        deadline = check.since + rules.check_timeout + CHECK_MARGIN
        if awaited(check, nodes, now) and now < deadline:
            return Step(plan, (Deadline(deadline, DeadlineReason.FEATURE),), lines)
        check = add_facts(rules, check, nodes, now)
        diagnosis = diagnose(check, rules.straggler_threshold)
        # Without a node there is nothing to report: all were requested to stop.
        is_reported = any(node.is_here for node in check.nodes)
        lines += tuple(text.round_lines(check, diagnosis.failing)) if is_reported else ()
        tasks = _next_tasks(rules, check, diagnosis)
        if tasks is None:
            plan, last = _conclude(rules, plan, check, diagnosis, now)
            lines += last if is_reported else ()
        else:
            plan = _continue(plan, msgspec.structs.replace(check, flagged=diagnosis.flagged), tasks, now)
    return Step(plan, (), lines)


def check_during_training(rules: NodeCheckRules, plan: Plan, nodes: Nodes, now: float) -> Step:
    """Check newcomers while others train: by their first measurement, and again where that is in doubt."""
    lines: tuple[str, ...] = ()
    deadlines: tuple[Deadline, ...] = ()
    if state_of(plan).check is not None:
        plan, deadlines, lines = step(rules, plan, nodes, now)[:3]
    if state_of(plan).check is None:
        known = {key_of(node_health) for node_health in state_of(plan).health}
        new = [p for p in eligible_nodes(plan, nodes) if p.report.key not in known]
        waited_for = computing(rules, plan, new, now)
        deadlines = deadline_if(
            min((computes_until(rules, p) for p in waited_for), default=None), DeadlineReason.FEATURE
        )
        still = {p.report.key for p in waited_for}
        ready = [p for p in new if p.report.key not in still]
        if ready:
            in_round = [p for member in plan.members if (p := nodes.get(member.key)) and member.key in known]
            check = msgspec.structs.replace(
                _new_check(rules, plan, [*in_round, *ready], now, anew=False), during_training=True
            )
            begun = update(plan, now, check=check, check_count=check.key.number)
            plan, further, more = step(rules, begun, nodes, now)[:3]
            deadlines, lines = deadlines + further, lines + more
    return Step(plan, deadlines, lines)


def computes_anew(rules: NodeCheckRules, plan: Plan) -> bool:
    """Whether what nodes computed before the check does not count in it."""
    return rules.check == CHECK_ALWAYS and plan.key.number > 0


def computes_until(rules: NodeCheckRules, p: KnownNode) -> float:
    return p.joined_at + rules.check_timeout + CHECK_MARGIN


def _new_check(rules: NodeCheckRules, plan: Plan, nodes: Sequence[KnownNode], now: float, anew: bool) -> NodeCheck:
    """A check of the nodes that take part in one, before its first round, with the speeds that are known."""
    nodes = [p for p in nodes if not without_check(p)]
    known = {key_of(node_health): node_health for node_health in state_of(plan).health}
    facts = []
    for place, p in enumerate(nodes):
        node_health = known.get(p.report.key)
        if node_health is not None:
            if node_health.tflops > 0:
                # Its last report is of the process that has passed, as the result is.
                device = result.device if (result := report_of(p).compute_result) is not None else ""
                facts.append(ComputeFact(place, node_health.tflops, device=device))
        elif not anew:
            waited = rules.check_timeout + CHECK_MARGIN
            facts.append(computed_fact(place, report_of(p).compute_result, waited))
    checked_nodes = tuple(
        CheckedNode(
            node_id=p.report.node_id,
            incarnation=p.report.incarnation,
            host=p.report.host,
            address=p.report.address,
            port=report_of(p).check_port,
            workers=p.report.workers,
            already_passed=p.report.key in known,
        )
        for p in nodes
    )
    key = CheckKey(plan.epoch, state_of(plan).check_count + 1, 0)
    return NodeCheck(key=key, since=now, nodes=checked_nodes, compute_facts=tuple(facts), plan_reasons=plan.reasons)


def _next_tasks(rules: NodeCheckRules, check: NodeCheck, diagnosis: Diagnosis) -> RoundTasks | None:
    if not check.during_training:
        return next_round(check, diagnosis, bool(rules.measure_links))
    # A link would slow down the nodes that train.
    goes_on = diagnosis.compute_again and check.key.round + 1 < MAX_ROUNDS
    return RoundTasks(diagnosis.compute_again, ()) if goes_on else None


def _continue(plan: Plan, check: NodeCheck, tasks: RoundTasks, now: float) -> Plan:
    key = CheckKey(plan.epoch, check.key.number, check.key.round + 1)
    further = msgspec.structs.replace(check, key=key, since=now, compute=tasks.compute, groups=tasks.groups)
    if check.during_training:
        return update(plan, now, check=further)
    return update(plan, now, check=further, since=waiting_since(plan, check, now), reasons=text.checking(further))


def waiting_since(plan: Plan, check: NodeCheck, now: float) -> float:
    """Since when the nodes wait for others: the time of a check does not count towards their timeout."""
    return plan.since + (now - check.since)


def _conclude(
    rules: NodeCheckRules, plan: Plan, check: NodeCheck, diagnosis: Diagnosis, now: float
) -> tuple[Plan, tuple[str, ...]]:
    """The plan with the result of each checked node that is here, and lines for the log."""
    places = {key_of(node_health): place for place, node_health in enumerate(state_of(plan).health)}
    nodes_health = list(state_of(plan).health)
    new: list[NodeHealth] = []
    found: dict[HealthStatus, list[int]] = {status: [] for status in HealthStatus}
    for place, (node, finding) in enumerate(zip(check.nodes, diagnosis.findings, strict=True)):
        if node.already_passed or not node.is_here or key_of(node) in places:
            continue
        found[finding.status].append(place)
        is_slow = finding.status is HealthStatus.STRAGGLER
        node_health = health_of(
            node,
            finding.status,
            tflops=finding.tflops,
            gigabytes=finding.gigabytes,
            reason=finding.reason,
            dismissed=finding.status is HealthStatus.FAULT or (is_slow and bool(rules.exclude_stragglers)),
        )
        places[key_of(node)] = len(nodes_health)
        nodes_health.append(node_health)
        new.append(node_health)
    dismissed = [node_health for node_health in new if node_health.dismissed]
    warned = [one for one in new if one.status is HealthStatus.STRAGGLER and not one.dismissed]
    lines = (
        f"Fault nodes are: {found[HealthStatus.FAULT]} and stragglers are: {found[HealthStatus.STRAGGLER]}.",
        *([render(text.dismissals(dismissed))] if dismissed else []),
        *(f"warning: {node_health.host} is a straggler: it {node_health.reason}" for node_health in warned),
        *(f"warning: {note}" for note in diagnosis.notes),
    )
    changes: dict[str, Any] = {"check": None, "health": tuple(nodes_health)}
    if rules.measure_links:
        rows = text.link_rows(check.link_facts, [places.get(key_of(node)) for node in check.nodes])
        fresh = {(row.one, row.other) for row in rows}
        changes["links"] = tuple(link for link in state_of(plan).links if (link.one, link.other) not in fresh) + rows
    if not check.during_training:
        before = check.plan_reasons if plan.key.number or state_of(plan).check_count > 1 else ()
        changes["reasons"] = chain(before, *text.dismissals(dismissed)) or (text.NodeCheckCode.PASSED(),)
        # From a dismissal on the others wait for a node in the place of the one that leaves.
        changes["since"] = now if dismissed else waiting_since(plan, check, now)
    return update(plan, now, **changes), lines
