"""Between two rounds, and before the first: who is here, whether they are enough, and the round that they form."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dlrover_run.coordination.check_round import key_of
from dlrover_run.coordination.checking import (
    begin,
    candidates,
    computed_at,
    computes_anew,
    computing,
    drop_beside,
    forget,
    step,
)
from dlrover_run.coordination.decision import Deadline, DeadlineReason, Decision, changed, due, over
from dlrover_run.coordination.presence import Presence, Present
from dlrover_run.coordination.records import Member, NodePhase, NodeStatus, Plan, PlanPhase, RoundKey
from dlrover_run.coordination.rules import CHECK_NEVER, Rules
from dlrover_run.coordination.seating import seat_nodes
from dlrover_run.coordination.words import counted, names, node_name

Known = Sequence[tuple[Member, Presence | None]]
"""Members of a round, each with what is known of it."""


def gather(rules: Rules, plan: Plan, present: Present, now: float) -> Decision:
    """What follows while the job has no round that trains."""
    is_first = plan.key.number == 0
    if _all_have_left(present, now):
        # Whoever starts these nodes anew means another job, with a budget of its own.
        untold = is_first and not plan.checks
        reason = "every node has left" if untold else f"{plan.reason}, and no node is here any more"
        return over(plan, now, PlanPhase.FAILED, reason)
    plan = drop_beside(plan, now)
    if plan.check is not None:
        checked = step(rules, plan, present, now)
        if checked.plan.check is not None:
            return checked
        further = gather(rules, checked.plan, present, now)
        return Decision(further.plan, further.deadlines, checked.lines + further.lines)
    living = candidates(rules, plan, present)
    if is_first and not living and not (plan.checks and present):
        # Nobody waits.
        return Decision(plan)
    size = rules.size(len(living))
    # Where there has been a check there were enough nodes before, and some were lost or dismissed.
    patience = rules.join_timeout if is_first and not plan.checks else rules.pend_timeout
    if not size:
        deadline = plan.since + patience
        if now >= deadline:
            return over(plan, now, PlanPhase.FAILED, _short_of_nodes(rules, plan, living, patience))
        waits_for = DeadlineReason.JOIN if is_first and not plan.checks else DeadlineReason.REPLACEMENT
        return Decision(plan, (Deadline(deadline, waits_for),))
    complete = _complete(rules, plan, present, living, size, now)
    if complete is not None and now < complete.at:
        return Decision(plan, (complete,))
    if rules.check != CHECK_NEVER and not computes_anew(rules, plan):
        waited_for = {p.status.key for p in computing(rules, plan, living, now)}
        others = [p for p in living if p.status.key not in waited_for]
        if rules.size(len(others)) and (plan.key.number or plan.checks):
            # A newcomer of whom nothing is known yet keeps nobody from training; it is checked beside that.
            living, size = others, rules.size(len(others))
    seated = seat_nodes(plan.members, living, size)
    if rules.check != CHECK_NEVER:
        if not computes_anew(rules, plan):
            known_at = computed_at(rules, computing(rules, plan, seated, now))
            if known_at is not None:
                return Decision(plan, due(known_at, DeadlineReason.HEALTH))
        begun = begin(rules, plan, seated, living, now)
        if begun is not None:
            return gather(rules, begun, present, now)
    if not offers_a_fresh_port(rules, plan, seated[0].status):
        deadline = max(plan.since, seated[0].arrived) + patience
        if now >= deadline:
            leader = called(plan, seated[:1])[0]
            silent = f"{leader} should have led the next round, and did not answer for {patience:g} s"
            return over(plan, now, PlanPhase.FAILED, silent)
        return Decision(plan, (Deadline(deadline, DeadlineReason.LEADER),))
    reason = plan.reason
    if is_first and any(checkup.dismissed and key_of(checkup) in present for checkup in plan.checked):
        reason = f"{plan.reason}; {counted(size, 'node')} {'is' if size == 1 else 'are'} left"
    elif is_first:
        reason = "the one node is here" if size == 1 else f"{size} nodes are here"
        if size < rules.full_size:
            reason += f", and nobody else came for {rules.last_call_timeout:g} s"
    return Decision(form(rules, plan, seated, now, reason))


def _all_have_left(present: Present, now: float) -> bool:
    """Whether the last ones who were here have left by request, so that nobody is expected back.

    One that was not yet known to be lost when the last of them left was lost in the same moment. It is waited for, as
    it would be had it been lost a moment after the others left: what becomes of the job must not depend on the order.
    """
    left = [p for p in present.values() if p.left]
    lost = [p for p in present.values() if not p.left and p.lost(now)]
    if not left or len(left) + len(lost) < len(present):
        return False
    last_left = max(p.changed if p.broken is None or p.status.phase is NodePhase.LEFT else p.broken for p in left)
    return all(p.lost_at is not None and p.lost_at <= last_left for p in lost)


def form(rules: Rules, plan: Plan, seated: list[Presence], now: float, reason: str) -> Plan:
    """The next round, of the nodes `seated` in the order of their ranks."""
    leader = seated[0].status
    # A store that the user placed by hand keeps its port; it is fresh all the same, because it lives in the worker with
    # rank 0 and dies with it.
    address, port = rules.store or (leader.address, leader.port)
    return changed(
        plan,
        now,
        phase=PlanPhase.TRAINING,
        since=now,
        key=RoundKey(plan.epoch, plan.key.number + 1),
        members=tuple(_member(p.status) for p in seated),
        store_address=address,
        store_port=port,
        reason=reason,
    )


def offers_a_fresh_port(rules: Rules, plan: Plan, leader: NodeStatus) -> bool:
    """Whether no round has ever used the port that this node offers for the store.

    A node holds another port as soon as it hears of another round or of another coordinator, so it is fresh when the
    node knows of the last ones. One that has not heard yet may be offering the very port of the round that it has not
    heard of, and the workers of two rounds could meet there. That goes for one that obeys nobody yet, too: a
    predecessor without a journal may have told only others of a round with it. One that knows of a later round than we
    do, from such a predecessor, has no use for our last one.
    """
    knows = leader.heard == plan.key and leader.epoch == plan.epoch
    return rules.store is not None or knows or leader.heard > plan.key


def regroup(rules: Rules, plan: Plan, present: Present, now: float, reason: str) -> Decision:
    """The round is over: form the next one with whoever lives, or wait for others."""
    ended = changed(forget(rules, plan), now, phase=PlanPhase.GATHERING, since=now, reason=reason)
    return gather(rules, ended, present, now)


def members_of(plan: Plan, present: Present) -> list[tuple[Member, Presence | None]]:
    """The members of the plan's round with what is known of each; None for one that was never here."""
    return [(member, present.get(member.key)) for member in plan.members]


def until_known(members: Known, now: float) -> float | None:
    """When the last member whose connection has just broken is back or lost; None when there is no such member."""
    broken = [p for _, p in members if p is not None and p.lost_at is not None and not p.going]
    return max((p.lost_at for p in broken if p.lost_at is not None and now < p.lost_at), default=None)


def _complete(
    rules: Rules, plan: Plan, present: Present, living: list[Presence], size: int, now: float
) -> Deadline | None:
    """When it is known who takes part in the next round, should nobody come or go before that."""
    # A member is waited for in any case, for his rank is kept for him until he counts as lost.
    found = [*due(until_known(members_of(plan, present), now), DeadlineReason.LOST)]
    if size < rules.full_size:
        found += [
            Deadline(p.lost_at, DeadlineReason.LOST) for p in present.values() if p.lost_at is not None and not p.going
        ]
        if plan.key.number == 0 and not plan.checks:
            last_call = max(p.arrived for p in living) + rules.last_call_timeout
            found.append(Deadline(last_call, DeadlineReason.LAST_CALL))
    # Later everybody who lives is known, so nobody is waited for who may never come.
    return max(found, key=lambda deadline: deadline.at, default=None)


def _member(status: NodeStatus) -> Member:
    return Member(status.node_id, status.incarnation, status.host, status.workers, status.role)


def _short_of_nodes(rules: Rules, plan: Plan, living: list[Presence], waited: float) -> str:
    hosts = called(plan, living)
    are = "are" if len(hosts) > 1 else "is"
    here = f"only {len(hosts)} of at least {rules.fewest} nodes {are} here ({names(hosts)})"
    if not hosts:
        here = f"none of at least {rules.fewest} nodes is here"
    missing = missing_words(rules, plan, living)
    who = f"; missing: {missing}" if missing else ""
    before = f"{plan.reason}; " if plan.key.number or plan.checks else ""
    return f"{before}after {waited:g} s {here}{who}"


def called(plan: Plan, nodes: Sequence[Presence]) -> list[str]:
    """Those nodes for people: by the ranks of the last round, before the first one by ranks that somebody gave."""
    ranks = {member.key: rank for rank, member in enumerate(plan.members)}

    def rank_of(status: NodeStatus) -> int | None:
        return ranks.get(status.key) if ranks else status.rank_wish

    return [node_name(p.status.host, rank_of(p.status)) for p in nodes]


def missing_words(rules: Rules, plan: Plan, living: list[Presence]) -> str:
    """Who was here or is expected, in words for people: members of the last round, or ranks that somebody gave."""
    here = {p.status.key for p in living}
    if plan.members:
        return names([node_name(one.host, rank) for rank, one in enumerate(plan.members) if one.key not in here])
    wishes = {wish for p in living if (wish := p.status.rank_wish) is not None and wish < rules.fewest}
    if not living or any(p.status.rank_wish is None for p in living):
        return ""
    # A job may ask for a hundred thousand nodes, and these words are made again and again.
    first = itertools.islice((rank for rank in range(rules.fewest) if rank not in wishes), 3)
    return names([f"node {rank}" for rank in first], rules.fewest - len(wishes))
