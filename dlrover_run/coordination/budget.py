"""How often a job may fail: what one more failure of a worker means for it."""

from __future__ import annotations

from dlrover_run.coordination.decision import update_plan
from dlrover_run.coordination.records import Failure, Plan, PlanPhase
from dlrover_run.coordination.rules import JobRules


def consume_restart(rules: JobRules, plan: Plan, failure: Failure, worked: bool, now: float) -> Plan:
    """The plan after a round that `failure` ended: with one more restart, or failed when there is none left.

    `worked` says that some worker of the round got to work. A script that cannot start fails again and again before any
    worker does, and there is no use in trying on. Its words may be others each time: every round has another port.
    """
    barren = 0 if worked else plan.early_failures + 1
    charged = expire_restarts(rules, plan.restart_times, now)
    used = len(charged) if rules.restart_window else plan.restart_count
    if used >= rules.max_restarts:
        reason = f"{failure}{_exhausted(rules)}"
    elif rules.early_failure_limit and barren >= rules.early_failure_limit:
        reason = (
            f"{failure}; {barren} rounds in succession failed before any worker had got through init_process_group "
            "or written a checkpoint, so the job stops early (--rdzv-conf early_failure_limit=0 goes on)"
        )
    else:
        # Without a window only the number counts, and a job may have a great many.
        charged = (*charged, now) if rules.restart_window else ()
        count = plan.restart_count + 1
        return update_plan(
            plan,
            now,
            failure=failure,
            early_failures=barren,
            restart_count=count,
            restart_times=charged,
            reason=str(failure),
        )
    return update_plan(
        plan, now, phase=PlanPhase.FAILED, since=now, failure=failure, early_failures=barren, reason=reason
    )


def expire_restarts(rules: JobRules, charged: tuple[float, ...], now: float) -> tuple[float, ...]:
    """Those of the times at which a restart was charged that count still."""
    return tuple(time for time in charged if now < time + rules.restart_window)


def _exhausted(rules: JobRules) -> str:
    if rules.max_restarts == 0:
        return ""
    restarts = "the one restart" if rules.max_restarts == 1 else f"all {rules.max_restarts} restarts"
    window = f" of {rules.restart_window:g} s" if rules.restart_window else ""
    was = "was" if rules.max_restarts == 1 else "were"
    return f"; {restarts}{window} {was} used"
