"""Planned changes of a round that runs: newcomers that make it larger, and what an operator requests: another size, and
nodes to drain. Pure.

Nothing has failed, so the workers need not lose what they have done since their last checkpoint. In a job that marks
its checkpoints the change waits for the next mark, for `scale_wait` seconds at most. The coordinator announces the
change to all nodes, and each reports the first checkpoint that its workers mark from then on. So no clock of a node
matters, a node that marks a checkpoint at each step reports no more than one, and a successor of the coordinator goes
on with the same change.
"""

from __future__ import annotations

from dlrover_run.coordination.decision import Deadline, DeadlineReason, Decision, update_plan
from dlrover_run.coordination.gate import Gate
from dlrover_run.coordination.membership import KnownNode, Nodes
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.round import PlannedChange
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds.gathering import (
    eligible,
    end_round,
    gather,
    release_drains,
)
from dlrover_run.coordination.rounds.ranks import assign_ranks
from dlrover_run.words.reasons import Code, Reasons, chain, shown_names
from dlrover_run.words.text import node_name


def note_checkpoints(plan: Plan, nodes: Nodes, now: float) -> Plan:
    """The plan that says whether the job marks checkpoints."""
    if plan.saves or plan.phase is not PlanPhase.TRAINING or not any(s.report.saves for s in nodes.values()):
        return plan
    return update_plan(plan, now, saves=True)


def may_change(plan: Plan) -> bool:
    """Whether a change is planned, or was, though no node has come."""
    return bool(plan.change or plan.to_drain or plan.desired or plan.wanted_nodes)


def change_round(rules: JobRules, gate: Gate, plan: Plan, nodes: Nodes, now: float) -> Decision:
    """Make the planned change of a round that runs, if there is one and it has not to wait."""
    current = {member.key for member in plan.members}
    alive = _ready(gate, plan, nodes)
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
        if now < latest and not _have_saved(plan, nodes):
            return Decision(plan, (Deadline(latest, DeadlineReason.SCALE_UP if grows else DeadlineReason.CHECKPOINT),))
    if plan.to_drain:
        return Decision(update_plan(release_drains(plan, now), now, change=None))
    return _resize(rules, gate, plan, alive, nodes, now)


def _ready(gate: Gate, plan: Plan, nodes: Nodes) -> list[KnownNode]:
    """The nodes that the round could have at once: while a newcomer prepares, it goes on. The next round after one that
    has ended anyway takes it in at once."""
    current = {member.key for member in plan.members}
    ready = [
        state for state in eligible(gate, plan, nodes) if not state.report.preparing or state.report.key in current
    ]
    return gate.joins(plan, ready)


def _have_saved(plan: Plan, nodes: Nodes) -> bool:
    """Whether all nodes whose workers mark the checkpoints of this round have marked one since the announcement: one
    node, as a rule that with rank 0, or each node if each writes its own part."""
    reports = [state.report for member in plan.members if (state := nodes.get(member.key)) is not None]
    saving = [report for report in reports if report.saves and report.in_round(plan.key)]
    return bool(saving) and all(report.saved_for == plan.change for report in saving)


def _resize(rules: JobRules, gate: Gate, plan: Plan, alive: list[KnownNode], nodes: Nodes, now: float) -> Decision:
    """The larger or smaller round of these nodes. It is formed as any other, but the present one goes on until that can
    be done at once. Where the gate has something to do before, the present one ends first."""
    ranked = assign_ranks(plan.members, alive, rules.size(len(alive)))
    ended = end_round(gate, update_plan(plan, now, failure=None), now, _why_resized(rules, plan, ranked))
    following = gather(rules, gate, ended.plan, nodes, now, {state.report.key for state in alive})
    if following.again:
        forms = following.plan.phase is PlanPhase.TRAINING
        return following._replace(changes=ended.changes + following.changes) if forms else ended
    return Decision(plan, tuple(deadline for deadline in following.deadlines if deadline.reason is DeadlineReason.LOST))


def _why_resized(rules: JobRules, plan: Plan, ranked: list[KnownNode]) -> Reasons:
    current = {member.key for member in plan.members}
    joined = shown_names(
        [node_name(state.report.host, rank) for rank, state in enumerate(ranked) if state.report.key not in current]
    )
    number = {"after": len(ranked), "before": len(plan.members)}
    by = "an operator" if plan.desired is None else plan.desired.by or "an operator"
    choice = plan.size_choice if rules.wanted_nodes else None
    reason = Code.SCALED_UP(names=joined, **number) if joined else Code.SCALED_DOWN(by=by, **number)
    if choice is not None and not joined:
        reason = Code.RESIZED(**number)
    return (reason,) if choice is None else chain((reason,), *choice.reasons)
