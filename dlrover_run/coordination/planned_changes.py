"""Planned changes of a round that runs: newcomers that make it larger, and what an operator requests: another size, and
nodes to drain. Pure.

Nothing has failed, so the workers need not lose what they have done since their last checkpoint. In a job that marks
its checkpoints the change waits for the next mark, for `scale_wait` seconds at most. The coordinator announces the
change to all nodes, and each reports the first checkpoint that its workers mark from then on. So no clock of a node
matters, a node that marks a checkpoint at each step reports no more than one, and a successor of the coordinator goes
on with the same change.
"""

from __future__ import annotations

import msgspec

from dlrover_run.coordination.decision import Deadline, DeadlineReason, Decision, update_plan
from dlrover_run.coordination.gathering import (
    eligible,
    end_round,
    form_round,
    offers_a_fresh_port,
    release_drains,
)
from dlrover_run.coordination.membership import Members, MemberState
from dlrover_run.coordination.model import Plan, PlannedChange, PlanPhase
from dlrover_run.coordination.policy import Policy
from dlrover_run.coordination.ranks import assign_ranks
from dlrover_run.words.reasons import Code, chain, shown_names
from dlrover_run.words.text import node_name


def note_checkpoints(plan: Plan, members: Members, now: float) -> Plan:
    """The plan that says whether the job marks checkpoints."""
    if plan.saves or plan.phase is not PlanPhase.TRAINING or not any(s.report.saves for s in members.values()):
        return plan
    return update_plan(plan, now, saves=True)


def may_change(plan: Plan) -> bool:
    """Whether a change is planned, or was, though no node has come."""
    return bool(plan.change or plan.to_drain or plan.desired or plan.wanted_nodes)


def change_round(policy: Policy, plan: Plan, members: Members, now: float) -> Decision:
    """Make the planned change of a round that runs, if there is one and it has not to wait."""
    rules = policy.rules
    current = {member.key for member in plan.members}
    alive = _ready(policy, plan, members)
    newcomers = [state for state in alive if state.report.key not in current]
    size = rules.size(len(alive))
    grows = bool(newcomers) and size > len(plan.members)
    shrinks = 0 < size < len(plan.members) and rules.max_size < len(plan.members)
    # Members that drain end the round when they leave, and the next one is of the planned size.
    leaving = any(member.key in plan.draining for member in plan.members)
    if not (((grows or shrinks) and not leaving) or plan.to_drain):
        return Decision(plan if plan.change is None else update_plan(plan, now, change=None))
    if grows and not plan.to_drain:
        due_at = min(state.ready_at for state in newcomers) + rules.scale_up_delay
        if size < rules.max_size and now < due_at:
            return Decision(plan, (Deadline(due_at, DeadlineReason.SCALE_UP),))
    if plan.saves and rules.scale_wait:
        if plan.change is None:
            plan = update_plan(plan, now, change=PlannedChange(plan.epoch, now))
        assert plan.change is not None
        latest = plan.change.since + rules.scale_wait
        if now < latest and not _have_saved(plan, members):
            return Decision(plan, (Deadline(latest, DeadlineReason.SCALE_UP if grows else DeadlineReason.CHECKPOINT),))
    if plan.to_drain:
        return Decision(update_plan(release_drains(plan, now), now, change=None))
    return _resize(policy, plan, assign_ranks(plan.members, alive, size), now)


def _ready(policy: Policy, plan: Plan, members: Members) -> list[MemberState]:
    """The nodes that the round could have at once: while a newcomer prepares, it goes on. The next round after one that
    has ended anyway takes it in at once."""
    current = {member.key for member in plan.members}
    nodes = [
        state for state in eligible(policy, plan, members) if not state.report.preparing or state.report.key in current
    ]
    return policy.admitted(plan, nodes)


def _have_saved(plan: Plan, members: Members) -> bool:
    """Whether all nodes whose workers mark the checkpoints of this round have marked one since the announcement: one
    node, as a rule that with rank 0, or each node if each writes its own part."""
    reports = [state.report for member in plan.members if (state := members.get(member.key)) is not None]
    saving = [report for report in reports if report.saves and report.in_round(plan.key)]
    return bool(saving) and all(report.saved_for == plan.change for report in saving)


def _resize(policy: Policy, plan: Plan, ranked: list[MemberState], now: float) -> Decision:
    """The larger or smaller round of these nodes."""
    if not offers_a_fresh_port(policy.rules, plan, ranked[0].report):
        return Decision(plan)
    current = {member.key for member in plan.members}
    joined = shown_names(
        [node_name(state.report.host, rank) for rank, state in enumerate(ranked) if state.report.key not in current]
    )
    number = {"after": len(ranked), "before": len(plan.members)}
    by = "an operator" if plan.desired is None else plan.desired.by or "an operator"
    choice = plan.size_choice if policy.rules.wanted_nodes else None
    reason = Code.SCALED_UP(names=joined, **number) if joined else Code.SCALED_DOWN(by=by, **number)
    if choice is not None and not joined:
        reason = Code.RESIZED(**number)
    reasons = (reason,) if choice is None else chain((reason,), *choice.reasons)
    ended = msgspec.structs.replace(plan, failure=None)
    if policy.needs_gathering:
        return end_round(policy, ended, now, reasons)
    return Decision(form_round(policy.rules, ended, ranked, now, reasons), again=True)
