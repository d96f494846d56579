"""One decision: from the rules, the plan, the members and the job time to the next plan.

Pure: no clock, no socket, no thread. Idempotent: calling it again with the same inputs returns the same plan, so no
restart is lost or repeated.
"""

from __future__ import annotations

from dlrover_run.coordination.decision import DeadlineReason, Decision, deadline_if, update_plan
from dlrover_run.coordination.gathering import gather
from dlrover_run.coordination.membership import Members
from dlrover_run.coordination.model import OVER, Plan, PlanPhase
from dlrover_run.coordination.planned_changes import note_checkpoints
from dlrover_run.coordination.policy import Policy
from dlrover_run.coordination.running import expire_restarts, train


def decide(policy: Policy, plan: Plan, members: Members, now: float) -> Decision:
    """The plan that follows from `plan` once the nodes are as in `members` at job time `now`; `plan` itself when
    nothing has to change."""
    if plan.phase in OVER:
        return Decision(plan)
    rules = policy.rules
    whole = policy.decide(plan, members, now)
    if whole is not None:
        return whole
    charged = expire_restarts(rules, plan.restart_times, now)
    if charged != plan.restart_times:
        # Stored, because a successor's job time begins at the last plan that was stored.
        plan = update_plan(plan, now, restart_times=charged)
    plan, deadlines, lines, _ = policy.refresh(note_checkpoints(plan, members, now), members, now)
    decision = (gather if plan.phase is PlanPhase.GATHERING else train)(policy, plan, members, now)
    lines += decision.log_lines
    if policy.watches_spares and decision.plan.phase is PlanPhase.TRAINING and decision.plan.key != plan.key:
        # The policy acts on nodes without ranks from the begin of the new round on.
        decision = train(policy, decision.plan, members, now)
        lines += decision.log_lines
    if decision.plan.phase is PlanPhase.TRAINING and decision.plan.key != plan.key:
        begun = policy.refresh(note_checkpoints(decision.plan, members, now), members, now)
        decision = decision._replace(plan=begun.plan)
        deadlines, lines = begun.deadlines, (*lines, *begun.log_lines)
    if decision.plan.phase in OVER and policy.is_active(decision.plan):
        return Decision(policy.end_job(decision.plan, now), (), lines)
    forgiven_at = charged[0] + rules.restart_window if charged else None
    deadlines += (*decision.deadlines, *deadline_if(forgiven_at, DeadlineReason.BUDGET))
    return Decision(decision.plan, deadlines, lines)
