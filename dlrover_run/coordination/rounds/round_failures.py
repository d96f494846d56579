"""While a round runs: what ends it, what a failure costs, and which nodes take part in the next round."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from dlrover_run.coordination.decision import (
    Deadline,
    DeadlineReason,
    Decision,
    changed_by,
    deadline_if,
    end_job,
    update_plan,
)
from dlrover_run.coordination.gate import Gate
from dlrover_run.coordination.membership import KnownNode, Nodes
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodePhase
from dlrover_run.coordination.records.round import Failure, Member, RoundKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds.gathering import (
    RoundMembers,
    disconnects_resolved_at,
    end_round,
    release_drains,
    round_members,
)
from dlrover_run.coordination.rounds.planned_changes import change_round, may_change
from dlrover_run.coordination.rounds.waiting import wait_as_spare
from dlrover_run.words.reasons import Code, Reasons, chain, shown_names
from dlrover_run.words.text import node_name


def consume_restart(rules: JobRules, plan: Plan, failure: Failure, worked: bool, now: float) -> Plan:
    """The plan after a round that `failure` ended: with one more restart, or failed when there is none left.

    `worked`: at least one worker of the round made progress. A script that cannot start fails in each round before any
    worker makes progress, so further rounds are of no use. Its message may differ each time, as each round has another
    port.
    """
    early_failures = 0 if worked else plan.early_failures + 1
    charged = expire_restarts(rules, plan.restart_times, now)
    used = len(charged) if rules.restart_window else plan.restart_count
    if used >= rules.max_restarts:
        reasons = (failure.reason, *_exhausted(rules))
    elif rules.early_failure_limit and early_failures >= rules.early_failure_limit:
        reasons = (failure.reason, Code.EARLY_FAILURES(number=early_failures))
    else:
        # Without a window only the number counts, and a job may have a great many.
        charged = (*charged, now) if rules.restart_window else ()
        count = plan.restart_count + 1
        return update_plan(
            plan,
            now,
            failure=failure,
            early_failures=early_failures,
            restart_count=count,
            restart_times=charged,
            reasons=(failure.reason,),
        )
    return end_job(plan, now, PlanPhase.FAILED, reasons, failure=failure, early_failures=early_failures)


def expire_restarts(rules: JobRules, charged: tuple[float, ...], now: float) -> tuple[float, ...]:
    """Those of the times at which a restart was charged that count still."""
    return tuple(time for time in charged if now < time + rules.restart_window)


def _exhausted(rules: JobRules) -> Reasons:
    if rules.max_restarts == 0:
        return ()
    if rules.restart_window:
        return (Code.RESTARTS_OF_WINDOW_USED(most=rules.max_restarts, window=rules.restart_window),)
    return (Code.RESTARTS_USED(most=rules.max_restarts),)


def continue_round(rules: JobRules, gate: Gate, plan: Plan, nodes: Nodes, now: float) -> Decision:
    """What follows while a round runs: it goes on, or ends with the job, by a failure or by the loss of a node."""
    key = plan.key
    if over := plan.first_reasons(lambda part: part.why_over(plan)):
        return end_round(gate, msgspec.structs.replace(plan, failure=None), now, over)
    in_round = round_members(plan, nodes)
    done = [member.done or (state is not None and state.succeeded_in(key)) for member, state in in_round]
    if all(done):
        if goes_on := plan.first_reasons(lambda part: part.why_not_finished(plan)):
            return end_round(gate, msgspec.structs.replace(plan, failure=None), now, goes_on)
        return Decision(end_job(plan, now, PlanPhase.FINISHED, (Code.ALL_SUCCEEDED(),), failure=None))

    unfinished = [pair for pair, is_done in zip(in_round, done, strict=True) if not is_done]
    lost_or_left = [
        (member, state) for member, state in unfinished if state is None or state.is_lost(now) or state.has_left
    ]
    failed = sorted(
        (state for _, state in unfinished if state and _failure(state, key)),
        key=lambda state: (state.changed_at, state.report.key),
    )
    match _judge(rules, in_round, unfinished, lost_or_left, failed, now):
        case Failed(cause):
            return _restart(rules, gate, plan, nodes, cause, now)
        case Departed(departed):
            return _regroup_without(gate, plan, departed, now)
        case Deadline() as known:
            return Decision(plan, (known,))
    broken = disconnects_resolved_at(in_round, now)
    if any(done):
        # No node joins any more. The success of a member that is about to be dropped is kept in the plan.
        released = release_drains(plan, now)
        watched = gate.during(released, nodes, now)
        remembered = _remember_done(watched.plan, nodes, now)
        changes = changed_by(gate.name, released, watched.plan)
        return Decision(remembered, deadline_if(broken, DeadlineReason.LOST), watched.log_lines, changes=changes)
    if broken is not None:
        return Decision(plan, deadline_if(broken, DeadlineReason.LOST))
    watched = gate.during(plan, nodes, now)
    decision = Decision(watched.plan)
    if len(nodes) != len(in_round) or may_change(watched.plan):
        decision = change_round(rules, gate, watched.plan, nodes, now)
    return decision._replace(
        deadlines=watched.deadlines + decision.deadlines,
        log_lines=watched.log_lines + decision.log_lines,
        wait=partial(wait_as_spare, rules, gate, decision.plan, dict(nodes), watched),
        changes=changed_by(gate.name, plan, watched.plan) + decision.changes,
    )


class Failed(NamedTuple):
    """The round ends by the failure of this node, which is charged unless a feature excuses it."""

    cause: KnownNode


class Departed(NamedTuple):
    """The round ends without a charge: these members were lost, have left or are about to."""

    members: RoundMembers


def _judge(
    rules: JobRules,
    in_round: RoundMembers,
    unfinished: RoundMembers,
    lost_or_left: RoundMembers,
    failed: Sequence[KnownNode],
    now: float,
) -> Failed | Departed | Deadline | None:
    """What ends the round, or when that is known; None if it goes on. Only what nothing before explains is charged:

    1. A failure of a worker's own, if no member had begun to drain or lost its connection before it.
    2. Members that are lost or have left, once it is known whether others are lost with them: one round is enough for
       all losses.
    3. Failures while a member drains: it has ended its workers, and their peers failed because of that.
    4. Any other failure, once it is known whether a peer was lost, whose connection broke or which has not reported.
    """
    cause = _first_own(failed)
    if cause is not None and not _departed_before(cause.changed_at, unfinished):
        return Failed(cause)
    broken = disconnects_resolved_at(in_round, now)
    if lost_or_left:
        return Departed(lost_or_left) if broken is None else Deadline(broken, DeadlineReason.LOST)
    if not failed:
        return None
    if leavers := [(member, state) for member, state in unfinished if state is not None and state.is_draining]:
        return Departed(leavers)
    known_at = failed[0].changed_at + (rules.blame_delay if len(failed) < len(unfinished) else 0.0)
    if broken is None or broken < known_at:
        known = Deadline(known_at, DeadlineReason.BLAME)
    else:
        known = Deadline(broken, DeadlineReason.LOST)
    return Failed(failed[0]) if now >= known.at else known


def _failure(state: KnownNode, key: RoundKey) -> Failure | None:
    """Why the workers of that round failed on that node, if they did. A draining node may report it last."""
    ended = state.report.phase in (NodePhase.FAILED, NodePhase.LEFT)
    return state.report.failure if ended and state.report.in_round(key) else None


def _first_own(failed: Sequence[KnownNode]) -> KnownNode | None:
    """The first failure that does not report the loss of a peer."""
    return next(
        (state for state in failed if state.report.failure is not None and not state.report.failure.lost_peer), None
    )


def _departed_before(time: float, unfinished: RoundMembers) -> bool:
    """Whether a member began to drain or lost its connection before that time, and so may have caused a failure."""
    for _, state in unfinished:
        if state is None or (state.is_draining and state.changed_at < time):
            return True
        if state.disconnected_at is not None and state.disconnected_at < time:
            return True
    return False


def _restart(rules: JobRules, gate: Gate, plan: Plan, nodes: Nodes, cause: KnownNode, now: float) -> Decision:
    failure = _failure(cause, plan.key)
    assert failure is not None, "only a failed node is a cause"
    node_rank = next(rank for rank, member in enumerate(plan.members) if member.key == cause.report.key)
    failure = msgspec.structs.replace(failure, node_rank=node_rank)
    if excuse := plan.first_reasons(lambda part: part.excuse_failure(plan)):
        excused = update_plan(plan, now, failure=failure)
        return end_round(gate, excused, now, (failure.reason, *excuse))
    worked = any(state.report.progressed and state.report.in_round(plan.key) for state in nodes.values())
    charged = consume_restart(rules, plan, failure, worked, now)
    if charged.phase is PlanPhase.FAILED:
        return Decision(charged)
    return end_round(gate, charged, now, charged.reasons)


def _regroup_without(gate: Gate, plan: Plan, lost_or_left: RoundMembers, now: float) -> Decision:
    """The next round after a change of membership, which costs nothing."""
    ended = msgspec.structs.replace(plan, failure=None)
    return end_round(gate, ended, now, _departures(plan, lost_or_left))


def _remember_done(plan: Plan, nodes: Nodes, now: float) -> Plan:
    def done(member: Member) -> bool:
        state = nodes.get(member.key)
        return member.done or (
            state is not None and (state.is_lost(now) or state.is_draining) and state.succeeded_in(plan.key)
        )

    remembered = tuple(msgspec.structs.replace(m, done=True) if done(m) and not m.done else m for m in plan.members)
    return plan if remembered == plan.members else update_plan(plan, now, members=remembered)


def _departures(plan: Plan, lost_or_left: RoundMembers) -> Reasons:
    """How members were lost or left: one reason for each way, with the names of its nodes."""
    by_way: dict[tuple[Code, tuple[tuple[str, str], ...]], list[str]] = {}
    ranks = {member.key: rank for rank, member in enumerate(plan.members)}
    for member, state in lost_or_left:
        by_way.setdefault(_departure(state), []).append(node_name(member.host, ranks[member.key]))
    ways = by_way.items()
    return chain((), *(code(names=shown_names(names), number=len(names), **dict(more)) for (code, more), names in ways))


def _departure(state: KnownNode | None) -> tuple[Code, tuple[tuple[str, str], ...]]:
    """How one member was lost or left, and the parameters of that reason beside the names."""
    if state is None or not state.is_draining:
        return Code.LOST, ()
    if state.report.failure is not None:
        return Code.LEFT_AFTER_FAILURE, (("what", state.report.failure.exit_text),)
    if state.report.ended_by:
        return Code.ENDED_BY_SIGNAL, (("signal", state.report.ended_by),)
    return (Code.LEFT_ON_REQUEST if state.report.phase is NodePhase.LEFT else Code.ASKED_TO_LEAVE), ()
