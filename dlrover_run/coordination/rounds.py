"""The rounds of a job: one ends, the next one is gathered, formed, and runs. Pure."""

from __future__ import annotations

from dlrover_run.coordination.decision import DeadlineReason, Decision, deadline_if, update_plan
from dlrover_run.coordination.gathering import gather
from dlrover_run.coordination.membership import Members
from dlrover_run.coordination.model import OVER, Plan, PlanPhase
from dlrover_run.coordination.planned_changes import note_checkpoints
from dlrover_run.coordination.policy import Policy
from dlrover_run.coordination.running import expire_restarts, train


def decide_round(policy: Policy, plan: Plan, members: Members, now: float) -> Decision:
    """What follows in a job that is not over. `decide` calls it once more after each round that has ended or begun."""
    charged = expire_restarts(policy.rules, plan.restart_times, now)
    if charged != plan.restart_times:
        # Stored, because a successor's job time begins at the last plan that was stored.
        plan = update_plan(plan, now, restart_times=charged)
    noted = policy.refresh(note_checkpoints(plan, members, now), members, now)
    decision = (gather if plan.phase is PlanPhase.GATHERING else train)(policy, noted.plan, members, now)
    decision = decision._replace(log_lines=noted.log_lines + decision.log_lines)
    if decision.plan.phase in OVER:
        ended = policy.end_job(decision.plan, now) if policy.is_active(decision.plan) else decision.plan
        return Decision(ended, (), decision.log_lines)
    forgiven_at = charged[0] + policy.rules.restart_window if charged else None
    deadlines = (*noted.deadlines, *decision.deadlines, *deadline_if(forgiven_at, DeadlineReason.BUDGET))
    return decision._replace(deadlines=deadlines)
