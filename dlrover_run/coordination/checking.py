"""The steps of a node check inside `decide`: who is to be checked, what came of each round, what follows from that.

A check stands in the plan from its begin to its end, so a successor goes on with it. What a node computes of its own
accord counts once, at the begin of the check that is its first; where nodes are checked before each round all compute
anew, by task, once there has been a round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from dlrover_run.coordination import check_words
from dlrover_run.coordination.check_records import (
    Check,
    Checkup,
    ComputeFact,
    Examinee,
    TaskKey,
    Verdict,
)
from dlrover_run.coordination.check_round import CHECK_MARGIN, add_facts, awaited, computed_fact, key_of
from dlrover_run.coordination.decision import Deadline, DeadlineReason, Decision, changed, due
from dlrover_run.coordination.diagnosis import Diagnosis, diagnose
from dlrover_run.coordination.pairing import MAX_ROUNDS, RoundTasks, first_round, next_round
from dlrover_run.coordination.presence import Presence, Present
from dlrover_run.coordination.records import Plan
from dlrover_run.coordination.rules import CHECK_ALWAYS, CHECK_NEVER, Rules

WITHOUT_CHECK = "it was started without --network-check"
"""Why a node takes no part in checks."""

MOST_REMEMBERED = 16
"""Dismissed nodes that are remembered though they are gone, the last ones: one that comes back is still dismissed. A
node leaves as soon as it hears of its dismissal, so that hardly one ever does."""


def candidates(rules: Rules, plan: Plan, present: Present) -> list[Presence]:
    """Who may have a place in a round to come: whoever can train and was not dismissed by a check."""
    living = [p for p in present.values() if p.can_train]
    if rules.check == CHECK_NEVER:
        return living
    dismissed = {key_of(checkup) for checkup in plan.checked if checkup.dismissed}
    return [p for p in living if p.status.key not in dismissed]


def cleared(rules: Rules, plan: Plan, living: Iterable[Presence]) -> list[Presence]:
    """Those of the candidates who may have a seat now."""
    if rules.check == CHECK_NEVER:
        return list(living)
    passed = {key_of(checkup) for checkup in plan.checked if not checkup.dismissed}
    return [p for p in living if p.status.key in passed]


def pass_unchecked(plan: Plan, present: Present, now: float) -> Decision:
    """The plan in which those who take no part in checks are known for that, so that nobody waits for them."""
    known = {key_of(checkup) for checkup in plan.checked}
    new = [p.status for p in present.values() if p.can_train and p.unaware_of_checks and p.status.key not in known]
    if not new:
        return Decision(plan)
    checkups = (
        Checkup(
            node_id=status.node_id,
            incarnation=status.incarnation,
            host=status.host,
            verdict=Verdict.UNCHECKED,
            reason=WITHOUT_CHECK,
        )
        for status in new
    )
    lines = tuple(f"warning: {status.host} was not checked: {WITHOUT_CHECK}" for status in new)
    return Decision(changed(plan, now, checked=(*plan.checked, *checkups)), (), lines)


def prune(plan: Plan, present: Present, now: float) -> Plan:
    """The plan without what is known of processes that are gone, but for those that may not come back."""
    gone = [place for place, checkup in enumerate(plan.checked) if key_of(checkup) not in present]
    remembered = [place for place in gone if plan.checked[place].dismissed][-MOST_REMEMBERED:]
    if len(gone) == len(remembered):
        return plan
    dropped = {*gone} - {*remembered}
    kept = [place for place in range(len(plan.checked)) if place not in dropped]
    places = {old: new for new, old in enumerate(kept)}
    links = tuple(
        msgspec.structs.replace(link, one=places[link.one], other=places[link.other])
        for link in plan.links
        if link.one in places and link.other in places
    )
    return changed(plan, now, checked=tuple(plan.checked[place] for place in kept), links=links)


def forget(rules: Rules, plan: Plan) -> Plan:
    """The plan after the end of a round: with `CHECK_ALWAYS` everybody is to be checked again. Who was dismissed stays
    so, and who takes no part in checks takes none in the next one."""
    if rules.check != CHECK_ALWAYS:
        return plan
    kept = tuple(one for one in plan.checked if one.dismissed or one.verdict is Verdict.UNCHECKED)
    return msgspec.structs.replace(plan, checked=kept, links=())


def drop_beside(plan: Plan, now: float) -> Plan:
    """The plan without a check beside training, when there is no training any more: those whom it was about are checked
    with the others."""
    return changed(plan, now, check=None) if plan.check is not None and plan.check.beside else plan


def computing(rules: Rules, plan: Plan, living: Iterable[Presence], now: float) -> list[Presence]:
    """Those for whom a check waits: they are to be checked, and still have time to compute of their own accord."""
    known = {key_of(checkup) for checkup in plan.checked}
    return [
        p for p in living if p.status.computed is None and p.status.key not in known and now < _computes_until(rules, p)
    ]


def computed_at(rules: Rules, waited_for: Iterable[Presence]) -> float | None:
    """When nobody waits any more for the last of those who have not computed."""
    return max((_computes_until(rules, p) for p in waited_for), default=None)


def begin(rules: Rules, plan: Plan, seated: Sequence[Presence], spares: Iterable[Presence], now: float) -> Plan | None:
    """The plan with a check of those who would be `seated` in a round formed now, in the order of their ranks, and of
    the `spares` that have computed; None when the seated are all checked."""
    known = {key_of(checkup) for checkup in plan.checked}
    if all(p.status.key in known for p in seated):
        return None
    taken = known.union(p.status.key for p in seated)
    more = [p for p in spares if p.status.key not in taken]
    waited_for = {p.status.key for p in computing(rules, plan, more, now)}
    nodes = [*seated, *(p for p in more if p.status.key not in waited_for)]
    check = _examine(rules, plan, nodes, now, anew=computes_anew(rules, plan))
    tasks = first_round(check, bool(rules.measure_links), rules.straggler_threshold)
    check = msgspec.structs.replace(check, compute=tasks.compute, groups=tasks.groups)
    # One that knows of a later round than we do, from a predecessor whose journal is not there, takes no task of an
    # earlier one.
    key = max(plan.key, *(p.status.heard for p in nodes))
    return changed(plan, now, key=key, check=check, checks=check.key.number, reason=check_words.goes_on(check))


def resume(plan: Plan) -> Plan:
    """A predecessor's plan, for its successor: the round of a check that goes on begins anew.

    Some may have heard of their task long before the others do, and would have met nobody.
    """
    check = plan.check
    if check is None:
        return plan
    key = TaskKey(plan.epoch, check.key.number, check.key.round)
    since = plan.since if check.beside else _since(plan, check, plan.clock)
    return msgspec.structs.replace(plan, since=since, check=msgspec.structs.replace(check, key=key, since=plan.clock))


def step(rules: Rules, plan: Plan, present: Present, now: float) -> Decision:
    """Go on with the plan's check as far as the answers that are here lead; at its end the plan has none any more."""
    lines: tuple[str, ...] = ()
    while (check := plan.check) is not None:
        deadline = check.since + rules.check_timeout + CHECK_MARGIN
        if awaited(check, present, now) and now < deadline:
            return Decision(plan, (Deadline(deadline, DeadlineReason.HEALTH),), lines)
        check = add_facts(rules, check, present, now)
        diagnosis = diagnose(check, rules.straggler_threshold)
        lines += tuple(check_words.round_lines(check, diagnosis.failing))
        tasks = _next_tasks(rules, check, diagnosis)
        if tasks is None:
            plan, last = _conclude(rules, plan, check, diagnosis, now)
            lines += last
        else:
            plan = _go_on(plan, msgspec.structs.replace(check, named=diagnosis.named), tasks, now)
    return Decision(plan, (), lines)


def check_beside(rules: Rules, plan: Plan, present: Present, now: float) -> Decision:
    """Check newcomers while others train: by what they have computed alone, and again where that is doubtful."""
    lines: tuple[str, ...] = ()
    deadlines: tuple[Deadline, ...] = ()
    if plan.check is not None:
        plan, deadlines, lines = step(rules, plan, present, now)
    if plan.check is None:
        known = {key_of(checkup) for checkup in plan.checked}
        new = [p for p in candidates(rules, plan, present) if p.status.key not in known]
        waited_for = computing(rules, plan, new, now)
        deadlines = due(min((_computes_until(rules, p) for p in waited_for), default=None), DeadlineReason.HEALTH)
        still = {p.status.key for p in waited_for}
        ready = [p for p in new if p.status.key not in still]
        if ready:
            members = [p for member in plan.members if (p := present.get(member.key)) and member.key in known]
            check = msgspec.structs.replace(_examine(rules, plan, [*members, *ready], now, anew=False), beside=True)
            begun = changed(plan, now, check=check, checks=check.key.number)
            plan, further, more = step(rules, begun, present, now)
            deadlines, lines = deadlines + further, lines + more
    return Decision(plan, deadlines, lines)


def computes_anew(rules: Rules, plan: Plan) -> bool:
    """Whether what nodes computed before the check does not count in it."""
    return rules.check == CHECK_ALWAYS and plan.key.number > 0


def _computes_until(rules: Rules, p: Presence) -> float:
    return p.arrived + rules.check_timeout + CHECK_MARGIN


def _examine(rules: Rules, plan: Plan, nodes: Sequence[Presence], now: float, anew: bool) -> Check:
    """A check of those who take part in one, before its first round, with what is known of how they compute."""
    nodes = [p for p in nodes if not p.unaware_of_checks]
    known = {key_of(checkup): checkup for checkup in plan.checked}
    facts = []
    for place, p in enumerate(nodes):
        checkup = known.get(p.status.key)
        if checkup is not None:
            if checkup.tflops > 0:
                # What it said last is of the process that has passed, as the checkup is.
                device = p.status.computed.device if p.status.computed is not None else ""
                facts.append(ComputeFact(place, checkup.tflops, device=device))
        elif not anew:
            facts.append(computed_fact(place, p.status.computed, rules.check_timeout + CHECK_MARGIN))
    examinees = tuple(
        Examinee(
            node_id=p.status.node_id,
            incarnation=p.status.incarnation,
            host=p.status.host,
            address=p.status.address,
            port=p.status.check_port,
            workers=p.status.workers,
            trusted=p.status.key in known,
        )
        for p in nodes
    )
    key = TaskKey(plan.epoch, plan.checks + 1, 0)
    return Check(key=key, since=now, nodes=examinees, computed=tuple(facts), because=plan.reason)


def _next_tasks(rules: Rules, check: Check, diagnosis: Diagnosis) -> RoundTasks | None:
    if not check.beside:
        return next_round(check, diagnosis, bool(rules.measure_links))
    # Nobody who trains has anything to spare for links.
    goes_on = diagnosis.compute_again and check.key.round + 1 < MAX_ROUNDS
    return RoundTasks(diagnosis.compute_again, ()) if goes_on else None


def _go_on(plan: Plan, check: Check, tasks: RoundTasks, now: float) -> Plan:
    key = TaskKey(plan.epoch, check.key.number, check.key.round + 1)
    further = msgspec.structs.replace(check, key=key, since=now, compute=tasks.compute, groups=tasks.groups)
    if check.beside:
        return changed(plan, now, check=further)
    return changed(plan, now, check=further, since=_since(plan, check, now), reason=check_words.goes_on(further))


def _since(plan: Plan, check: Check, now: float) -> float:
    """Since when the nodes wait for others: the time of a check is nobody's patience."""
    return plan.since + (now - check.since)


def _conclude(rules: Rules, plan: Plan, check: Check, diagnosis: Diagnosis, now: float) -> tuple[Plan, tuple[str, ...]]:
    """The plan with a checkup of each examinee that is here, and what there is to say."""
    places = {key_of(checkup): place for place, checkup in enumerate(plan.checked)}
    checkups = list(plan.checked)
    new: list[Checkup] = []
    found: dict[Verdict, list[int]] = {verdict: [] for verdict in Verdict}
    for place, (node, finding) in enumerate(zip(check.nodes, diagnosis.findings, strict=True)):
        if node.trusted or not node.present or key_of(node) in places:
            continue
        verdict = finding.verdict
        found[verdict].append(place)
        slow = verdict is Verdict.STRAGGLER
        checkup = Checkup(
            node_id=node.node_id,
            incarnation=node.incarnation,
            host=node.host,
            verdict=verdict,
            tflops=finding.tflops,
            gigabytes=finding.gigabytes,
            reason=finding.reason,
            dismissed=verdict is Verdict.FAULT or (slow and bool(rules.exclude_stragglers)),
        )
        places[key_of(node)] = len(checkups)
        checkups.append(checkup)
        new.append(checkup)
    dismissed = [checkup for checkup in new if checkup.dismissed]
    warned = [one for one in new if one.verdict is Verdict.STRAGGLER and not one.dismissed]
    lines = (
        *check_words.end_lines(check, found[Verdict.FAULT], found[Verdict.STRAGGLER]),
        *([check_words.dismissal(dismissed)] if dismissed else []),
        *(f"warning: {checkup.host} is a straggler: it {checkup.reason}" for checkup in warned),
        *(f"warning: {note}" for note in diagnosis.notes),
    )
    changes: dict[str, Any] = {"check": None, "checked": tuple(checkups)}
    if rules.measure_links:
        rows = check_words.link_rows(check.linked, [places.get(key_of(node)) for node in check.nodes])
        fresh = {(row.one, row.other) for row in rows}
        changes["links"] = tuple(link for link in plan.links if (link.one, link.other) not in fresh) + rows
    if not check.beside:
        because = check.because if plan.key.number or plan.checks > 1 else ""
        words = check_words.dismissal(dismissed) if dismissed else ""
        changes["reason"] = "; ".join(filter(None, (because, words))) or "the nodes have passed their check"
        # From a dismissal on the others wait for somebody in place of who goes.
        changes["since"] = now if dismissed else _since(plan, check, now)
    return changed(plan, now, **changes), lines
