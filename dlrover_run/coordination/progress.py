"""What a waiting node is told: who is here, who is missing, how long still."""

from __future__ import annotations

from dlrover_run.coordination.presence import Present
from dlrover_run.coordination.records import NodeKey, Plan, PlanPhase, Waiting
from dlrover_run.coordination.rules import Rules
from dlrover_run.coordination.words import names


def progress(rules: Rules, plan: Plan, present: Present, wake_at: float | None, now: float) -> Waiting:
    """The words for every node without a seat; `wake_at` is when the coordinator decides without another word."""
    living = {key: p for key, p in present.items() if p.can_train}
    if plan.phase is PlanPhase.TRAINING:
        return Waiting(f"{len(plan.members)} nodes train and this one is a spare, {_spares(rules, plan, living)}")
    left = None if wake_at is None else max(0.0, wake_at - now)
    here = f"{len(living)} of {_wanted(rules)} nodes are here: {names([p.status.host for p in living.values()])}"
    missing = [member.host for member in plan.members if member.key not in living]
    who = f"; missing: {names(missing)}" if missing else ""
    return Waiting(f"{here}{who}", left)


def _wanted(rules: Rules) -> str:
    return f"{rules.least}" if rules.least == rules.most else f"{rules.least} to {rules.most}"


def _spares(rules: Rules, plan: Plan, living: Present) -> str:
    members: set[NodeKey] = {member.key for member in plan.members}
    spares = sum(key not in members for key in living)
    return f"one of {spares}" + (f" ({rules.spares} asked for)" if rules.spares else "")
