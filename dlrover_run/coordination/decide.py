"""The whole of coordination: statuses go in, the next plan comes out.

Pure: no clock, no socket, no thread. Deciding twice on the same statuses gives the same plan, so it may be called as
often as one likes and never loses or repeats a restart.
"""

from __future__ import annotations

from dlrover_run.coordination.decision import DeadlineReason, Decision, deadline_if, update_plan
from dlrover_run.coordination.membership import Members
from dlrover_run.coordination.model import OVER, Plan, PlanPhase
from dlrover_run.coordination.rendezvous import gather
from dlrover_run.coordination.rules import CHECK_NEVER, JobRules
from dlrover_run.coordination.running import expire_restarts, train
from dlrover_run.policies.health.policy import mark_unchecked, prune
from dlrover_run.policies.parameter_servers import policy as parameter_servers


def decide(rules: JobRules, plan: Plan, members: Members, now: float) -> Decision:
    """The plan that follows from `plan` once the nodes are as in `members` at job time `now`; `plan` itself when
    nothing has to change."""
    if plan.phase in OVER:
        return Decision(plan)
    if rules.cluster is not None:
        return parameter_servers.decide(rules, plan, members, now)
    charged = expire_restarts(rules, plan.restart_times, now)
    if charged != plan.restart_times:
        # Written down, for a successor's job time begins at the last plan that was.
        plan = update_plan(plan, now, restart_times=charged)
    lines: tuple[str, ...] = ()
    if rules.check != CHECK_NEVER:
        plan, _, lines = mark_unchecked(prune(plan, members, now), members, now)
    decision = (gather if plan.phase is PlanPhase.GATHERING else train)(rules, plan, members, now)
    lines += decision.log_lines
    if rules.check != CHECK_NEVER and decision.plan.phase is PlanPhase.TRAINING and decision.plan.key != plan.key:
        # Whoever has no place in the new round is checked beside it.
        decision = train(rules, decision.plan, members, now)
        lines += decision.log_lines
    if decision.plan.phase in OVER and decision.plan.check is not None:
        return Decision(update_plan(decision.plan, now, check=None), (), lines)
    forgiven_at = charged[0] + rules.restart_window if charged else None
    return Decision(decision.plan, (*decision.deadlines, *deadline_if(forgiven_at, DeadlineReason.BUDGET)), lines)
