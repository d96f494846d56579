"""While a round trains: what ends it, what that costs, and who takes part in the next one."""

from __future__ import annotations

import msgspec

from dlrover_run.coordination.budget import charge
from dlrover_run.coordination.checking import candidates, check_beside, cleared, drop_beside
from dlrover_run.coordination.decision import Deadline, DeadlineReason, Decision, changed, due, over, soonest
from dlrover_run.coordination.gathering import Known, form, members_of, offers_a_fresh_port, regroup, until_known
from dlrover_run.coordination.presence import Presence, Present
from dlrover_run.coordination.records import Failure, Member, NodePhase, Plan, PlanPhase, RoundKey
from dlrover_run.coordination.rules import CHECK_ALWAYS, CHECK_NEVER, Rules
from dlrover_run.coordination.seating import seat_nodes
from dlrover_run.coordination.words import departure, names, node_name


def train(rules: Rules, plan: Plan, present: Present, now: float) -> Decision:
    """What follows while a round trains."""
    key = plan.key
    members = members_of(plan, present)
    done = [member.done or (p is not None and p.succeeded_in(key)) for member, p in members]
    if all(done):
        return over(msgspec.structs.replace(plan, failure=None), now, PlanPhase.FINISHED, "every worker succeeded")

    unfinished = [pair for pair, is_done in zip(members, done, strict=True) if not is_done]
    gone = [(member, p) for member, p in unfinished if p is None or p.lost(now) or p.left]
    failed = sorted((p for _, p in unfinished if p and _failure(p, key)), key=lambda p: (p.changed, p.status.key))
    cause = _first_own(failed)
    if cause is not None and not _departed_before(cause.changed, unfinished):
        return _restart(rules, plan, present, cause, now)
    broken = until_known(members, now)
    if gone:
        # Whoever may be lost with them is known in a moment, and one round is enough for all.
        if broken is None:
            return _regroup_without(rules, plan, present, gone, now)
        return Decision(plan, due(broken, DeadlineReason.LOST))
    if failed:
        leavers = [(member, p) for member, p in unfinished if p is not None and p.going]
        if leavers:
            # Its peers failed because a node that was asked to go has ended its workers.
            return _regroup_without(rules, plan, present, leavers, now)
        # A peer whose connection broke may be what the others died of; that is known in a moment too. A member that has
        # said nothing may have vanished.
        delay = rules.cause_delay if len(failed) < len(unfinished) else 0.0
        known_at = failed[0].changed + delay
        if broken is None or broken < known_at:
            known = Deadline(known_at, DeadlineReason.BLAME)
        else:
            known = Deadline(broken, DeadlineReason.LOST)
        return _restart(rules, plan, present, failed[0], now) if now >= known.at else Decision(plan, (known,))
    if any(done):
        # Nobody new comes in any more. What a node had done that may be forgotten now is remembered.
        return Decision(_remember_done(drop_beside(plan, now), present, now), due(broken, DeadlineReason.LOST))
    if broken is not None:
        return Decision(plan, due(broken, DeadlineReason.LOST))
    if plan.check is None and len(present) == sum(p is not None for _, p in members):
        return Decision(plan)
    if rules.check == CHECK_NEVER:
        return _scale_up(rules, plan, present, now)
    checked = check_beside(rules, plan, present, now)
    decision = _scale_up(rules, checked.plan, present, now)
    return Decision(decision.plan, checked.deadlines + decision.deadlines, checked.lines + decision.lines)


def _failure(p: Presence, key: RoundKey) -> Failure | None:
    """Why the workers of that round failed on that node, if they did. A node that goes may say so last."""
    ended = p.status.phase in (NodePhase.FAILED, NodePhase.LEFT)
    return p.status.failure if ended and p.status.in_round(key) else None


def _first_own(failed: list[Presence]) -> Presence | None:
    """The first failure that is nobody else's by its own words."""
    return next((p for p in failed if p.status.failure is not None and not p.status.failure.lost_peer), None)


def _departed_before(time: float, unfinished: Known) -> bool:
    """Whether a member began to go, or lost its connection, before that, so that a failure then may be its doing."""

    def departed(p: Presence) -> float | None:
        return soonest(p.broken, p.changed if p.going else None)

    times = [departed(p) for _, p in unfinished if p is not None]
    is_unknown = any(p is None for _, p in unfinished)
    return is_unknown or any(departure is not None and departure < time for departure in times)


def _restart(rules: Rules, plan: Plan, present: Present, cause: Presence, now: float) -> Decision:
    failure = _failure(cause, plan.key)
    assert failure is not None, "only a failed node is a cause"
    node_rank = next(rank for rank, member in enumerate(plan.members) if member.key == cause.status.key)
    failure = msgspec.structs.replace(failure, node_rank=node_rank)
    worked = any(p.status.met and p.status.in_round(plan.key) for p in present.values())
    charged = charge(rules, plan, failure, worked, now)
    if charged.phase is PlanPhase.FAILED:
        return Decision(charged)
    return regroup(rules, charged, present, now, charged.reason)


def _regroup_without(rules: Rules, plan: Plan, present: Present, gone: Known, now: float) -> Decision:
    """The next round after a change of membership, which costs nothing."""
    return regroup(rules, msgspec.structs.replace(plan, failure=None), present, now, _departure_words(plan, gone))


def _scale_up(rules: Rules, plan: Plan, present: Present, now: float) -> Decision:
    """The round in which those take part who have come since, when it would be a larger one."""
    current = {member.key for member in plan.members}
    living = cleared(rules, plan, candidates(rules, plan, present))
    newcomers = [p for p in living if p.status.key not in current]
    size = rules.size(len(living))
    if not newcomers or size <= len(plan.members):
        return Decision(plan)
    due_at = min(p.arrived for p in newcomers) + rules.scale_up_delay
    if size < rules.full_size and now < due_at:
        return Decision(plan, (Deadline(due_at, DeadlineReason.SCALE_UP),))
    seated = seat_nodes(plan.members, living, size)
    if not offers_a_fresh_port(rules, plan, seated[0].status):
        return Decision(plan)
    joined = names([node_name(p.status.host, rank) for rank, p in enumerate(seated) if p.status.key not in current])
    reason = f"{joined} joined, so {size} nodes train instead of {len(plan.members)}"
    ended = msgspec.structs.replace(plan, failure=None)
    if rules.check == CHECK_ALWAYS:
        return regroup(rules, ended, present, now, reason)
    return Decision(form(rules, ended, seated, now, reason))


def _remember_done(plan: Plan, present: Present, now: float) -> Plan:
    def done(member: Member) -> bool:
        p = present.get(member.key)
        return member.done or (p is not None and (p.lost(now) or p.going) and p.succeeded_in(plan.key))

    members = tuple(msgspec.structs.replace(m, done=True) if done(m) and not m.done else m for m in plan.members)
    return plan if members == plan.members else changed(plan, now, members=members)


def _departure_words(plan: Plan, gone: Known) -> str:
    ranks = {member.key: rank for rank, member in enumerate(plan.members)}

    def how(p: Presence | None) -> str:
        if p is None or not p.going:
            return "was lost"
        if p.status.failure is not None:
            return f"left: {p.status.failure.what}"
        if p.status.phase is NodePhase.LEFT and not p.status.ended_by:
            return "left, as it was asked to"
        return departure(p.status.ended_by)

    by_verb: dict[str, list[str]] = {}
    for member, p in gone:
        by_verb.setdefault(how(p), []).append(node_name(member.host, ranks[member.key]))

    def sentence(verb: str, hosts: list[str]) -> str:
        if len(hosts) > 1:
            verb = verb.replace("was ", "were ").replace("it were", "they were")
        return f"{names(hosts)} {verb}"

    return "; ".join(sentence(verb, hosts) for verb, hosts in by_verb.items())
