"""The whole of coordination: statuses go in, the next plan comes out.

Pure: no clock, no socket, no thread. Deciding twice on the same statuses gives the same plan, so it may be called as
often as one likes and never loses or repeats a restart.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from dlrover_run.coordination.budget import charge
from dlrover_run.coordination.presence import Presence, Present
from dlrover_run.coordination.records import OVER, Failure, Member, NodePhase, Plan, PlanPhase, RoundKey
from dlrover_run.coordination.rules import Rules
from dlrover_run.coordination.seating import seat_nodes
from dlrover_run.coordination.words import names


class Decision(NamedTuple):
    """The plan that holds now, and the job time at which to decide again should no status come before that."""

    plan: Plan
    wake_at: float | None = None


def decide(rules: Rules, plan: Plan, present: Present, now: float) -> Decision:
    """The plan that follows from `plan` once the nodes are as in `present` at job time `now`; `plan` itself when
    nothing has to change."""
    if plan.phase in OVER:
        return Decision(plan)
    if plan.phase is PlanPhase.GATHERING:
        return _gather(rules, plan, present, now)
    return _train(rules, plan, present, now)


def _gather(rules: Rules, plan: Plan, present: Present, now: float) -> Decision:
    living = [p for p in present.values() if p.can_train]
    size = rules.size(len(living))
    if plan.key.number:
        # Everybody who lives is known, so nobody is waited for who may never come, except a member whose connection
        # has just broken: he is back in a moment, or lost.
        broken = _until_known(plan, present, now)
        if size and broken is None:
            return Decision(_form(rules, plan, living, size, now, _together(size)))
        deadline = plan.since + rules.pend_timeout
        if size == 0 and now >= deadline:
            return Decision(_fail(plan, now, _short_of_nodes(rules, plan, living, rules.pend_timeout)))
        return Decision(plan, _soonest(deadline if size == 0 else None, broken))
    if not living:
        return Decision(plan)
    if size and size == rules.full_size:
        return Decision(_form(rules, plan, living, size, now, _together(size)))
    if size:
        quiet_at = max(p.arrived for p in living) + rules.last_call_timeout
        if now >= quiet_at:
            reason = f"{_together(size)}, and nobody else came in {rules.last_call_timeout:g} s"
            return Decision(_form(rules, plan, living, size, now, reason))
        return Decision(plan, quiet_at)
    deadline = min(p.arrived for p in living) + rules.join_timeout
    if now >= deadline:
        return Decision(_fail(plan, now, _short_of_nodes(rules, plan, living, rules.join_timeout)))
    return Decision(plan, deadline)


def _train(rules: Rules, plan: Plan, present: Present, now: float) -> Decision:
    key = plan.key
    members = [(member, present.get(member.key)) for member in plan.members]
    done = [member.done or (p is not None and p.succeeded_in(key)) for member, p in members]
    if all(done):
        finished = msgspec.structs.replace(plan, phase=PlanPhase.FINISHED, since=now, failure=None)
        return Decision(msgspec.structs.replace(finished, reason="every worker succeeded"))

    unfinished = [pair for pair, over in zip(members, done, strict=True) if not over]
    gone = [m for m, p in unfinished if p is None or p.lost(now) or p.left]
    departures = [p for _, p in unfinished if p is not None and (p.going or not p.connected)]
    failed = sorted((p for p in present.values() if _failure(p, key)), key=lambda p: (p.changed, p.status.key))
    broken = _until_known(plan, present, now)

    # The failure of a worker counts when nothing that happened before explains it.
    first_departure = min((_departed(p) for p in departures), default=None)
    own = next((p for p in failed if not _lost_peer(p)), None)
    if own is not None and (first_departure is None or own.changed <= first_departure) and not _any_unknown(members):
        return _restart(rules, plan, present, own, now, broken)
    if gone:
        reason = _departure_words(gone, present)
        return _regroup(rules, plan, present, plan, now, reason, broken)
    if failed:
        if any(p.going for p in departures):
            # Its peers failed because a node that was asked to go has ended its workers.
            leavers = [m for m, p in unfinished if p is not None and p.going]
            return _regroup(rules, plan, present, plan, now, _departure_words(leavers, present), broken)
        if broken is not None:
            return Decision(plan, broken)
        known_at = failed[0].changed + (rules.cause_delay if len(members) > 1 else 0.0)
        if now < known_at:
            return Decision(plan, known_at)
        return _restart(rules, plan, present, failed[0], now, None)
    # What a lost node had done is remembered, for it may be forgotten now.
    plan = _remember_done(plan, present, now)
    if any(done):
        return Decision(plan, broken)
    return _scale_up(rules, plan, present, now, broken)


def _failure(p: Presence, key: RoundKey) -> Failure | None:
    """Why the workers of that round failed on that node, if they did. A node that goes may say so last."""
    ended = p.status.phase in (NodePhase.FAILED, NodePhase.LEFT)
    return p.status.failure if ended and p.status.in_round(key) else None


def _lost_peer(p: Presence) -> bool:
    return p.status.failure is not None and p.status.failure.lost_peer


def _departed(p: Presence) -> float:
    """When a node that is not there any more began to go."""
    return p.changed if p.broken is None else min(p.broken, p.changed) if p.going else p.broken


def _any_unknown(members: Iterable[tuple[Member, Presence | None]]) -> bool:
    """Whether a member is gone of which nobody knows since when."""
    return any(p is None and not member.done for member, p in members)


def _until_known(plan: Plan, present: Present, now: float) -> float | None:
    """When the last member whose connection has just broken is back or lost; None when there is no such member."""
    known = (present.get(member.key) for member in plan.members)
    times = [p.lost_at for p in known if p is not None and p.lost_at is not None and not p.going and now < p.lost_at]
    return max(times, default=None)


def _restart(rules: Rules, plan: Plan, present: Present, cause: Presence, now: float, broken: float | None) -> Decision:
    failure = _failure(cause, plan.key)
    assert failure is not None, "only a failed node is a cause"
    worked = any(p.status.met and p.status.in_round(plan.key) for p in present.values())
    charged = charge(rules, plan, failure, worked, now)
    if charged.phase is PlanPhase.FAILED:
        return Decision(_stamp(charged, now))
    return _regroup(rules, plan, present, charged, now, charged.reason, broken)


def _regroup(
    rules: Rules, plan: Plan, present: Present, charged: Plan, now: float, reason: str, broken: float | None
) -> Decision:
    """The next round with whoever lives, or the wait for others; `plan` itself while it is not yet clear who lives."""
    if broken is not None:
        return Decision(plan, broken)
    living = [p for p in present.values() if p.can_train]
    size = rules.size(len(living))
    if size:
        formed = _form(rules, charged, living, size, now, reason)
        return Decision(plan if formed is charged else formed)
    waiting = msgspec.structs.replace(charged, phase=PlanPhase.GATHERING, since=now, reason=reason)
    return Decision(_stamp(waiting, now))


def _scale_up(rules: Rules, plan: Plan, present: Present, now: float, broken: float | None) -> Decision:
    current = {member.key for member in plan.members}
    newcomers = [p for p in present.values() if p.can_train and p.status.key not in current]
    if not newcomers or broken is not None:
        return Decision(plan, broken)
    living = [p for p in present.values() if p.can_train]
    size = rules.size(len(living))
    if size <= len(plan.members):
        return Decision(plan)
    due = min(p.arrived for p in newcomers) + rules.scale_up_delay
    if size < rules.full_size and now < due:
        return Decision(plan, due)
    hosts = names([p.status.host for p in newcomers])
    joined = f"{hosts} joined, so {size} nodes train instead of {len(plan.members)}"
    return Decision(_form(rules, plan, living, size, now, joined))


def _form(rules: Rules, plan: Plan, living: list[Presence], size: int, now: float, reason: str) -> Plan:
    """The next round; `plan` itself while the node that would host the store has not heard of the last round."""
    seated = seat_nodes(plan.members, living, size)
    leader = seated[0].status
    if rules.store is not None:
        # A store that the user placed by hand keeps its port; it is fresh all the same, because it lives in the worker
        # with rank 0 and dies with it.
        address, port = rules.store
    else:
        # A fresh port for every round: workers of an old round can then never meet workers of a new one. A node that
        # has not heard of the round that may use its port still offers that one.
        if leader.heard != plan.key and any(member.key == leader.key for member in plan.members):
            return plan
        address, port = leader.address, leader.port
    members = tuple(
        Member(p.status.node_id, p.status.incarnation, p.status.host, p.status.workers, p.status.role) for p in seated
    )
    formed = msgspec.structs.replace(
        plan,
        phase=PlanPhase.TRAINING,
        since=now,
        key=RoundKey(plan.epoch, plan.key.number + 1),
        members=members,
        store_address=address,
        store_port=port,
        reason=reason,
    )
    return _stamp(formed, now)


def _remember_done(plan: Plan, present: Present, now: float) -> Plan:
    def done(member: Member) -> bool:
        p = present.get(member.key)
        return member.done or (p is not None and p.lost(now) and p.succeeded_in(plan.key))

    members = tuple(msgspec.structs.replace(m, done=True) if done(m) and not m.done else m for m in plan.members)
    return plan if members == plan.members else _stamp(msgspec.structs.replace(plan, members=members), now)


def _fail(plan: Plan, now: float, reason: str) -> Plan:
    return _stamp(msgspec.structs.replace(plan, phase=PlanPhase.FAILED, since=now, reason=reason), now)


def _stamp(plan: Plan, now: float) -> Plan:
    return msgspec.structs.replace(plan, clock=now)


def _soonest(*times: float | None) -> float | None:
    return min((time for time in times if time is not None), default=None)


def _together(size: int) -> str:
    return "the one node is here" if size == 1 else f"{size} nodes are here"


def _departure_words(gone: list[Member], present: Present) -> str:
    def how(member: Member) -> str:
        p = present.get(member.key)
        if p is None or not p.going:
            return "was lost"
        if p.status.failure is not None:
            return f"left: {p.status.failure.what}"
        return "left, as it was asked to" if p.status.phase is NodePhase.LEFT else "was asked to leave"

    hows = {how(member) for member in gone}
    if len(hows) > 1:
        return "; ".join(f"{member.host} {how(member)}" for member in gone[:4])
    verb = hows.pop()
    if len(gone) > 1:
        verb = verb.replace("was ", "were ").replace("it was asked", "they were asked")
    return f"{names([member.host for member in gone])} {verb}"


def _short_of_nodes(rules: Rules, plan: Plan, living: list[Presence], waited: float) -> str:
    here = {p.status.key for p in living}
    missing = [member.host for member in plan.members if member.key not in here]
    lost = f" since {plan.reason}" if missing else ""
    have = f"{len(living)} of at least {rules.least} nodes"
    who = f"; missing: {names(missing)}" if missing else ""
    return f"only {have} were here after {waited:g} s{lost}{who}"
