"""What a waiting node is told: who is here, who is missing, how long still."""

from __future__ import annotations

from dlrover_run.coordination.gathering import missing_words
from dlrover_run.coordination.presence import Presence, Present
from dlrover_run.coordination.records import Plan, PlanPhase, Waiting
from dlrover_run.coordination.rules import Rules
from dlrover_run.coordination.words import counted, names


def progress(rules: Rules, plan: Plan, present: Present, wake_at: float | None, now: float) -> Waiting:
    """The words for every node without a seat; `wake_at` is when the coordinator decides without another word."""
    living = [p for p in present.values() if p.can_train]
    left = None if wake_at is None else max(0.0, wake_at - now)
    if plan.phase is PlanPhase.TRAINING:
        return _beside(rules, plan, living, left)
    wanted = f"{rules.fewest}" if rules.fewest == rules.full_size else f"{rules.fewest} to {rules.full_size}"
    here = f"{counted(len(living), 'node')} of {wanted} {'is' if len(living) == 1 else 'are'} here"
    hosts = names([p.status.host for p in living])
    missing = missing_words(rules, plan, living)
    return Waiting(f"{here}{hosts and f': {hosts}'}{missing and f'; missing: {missing}'}", left)


def _beside(rules: Rules, plan: Plan, living: list[Presence], left: float | None) -> Waiting:
    """For a node that is here while others train."""
    train = f"{counted(len(plan.members), 'node')} {'trains' if len(plan.members) == 1 else 'train'}"
    if rules.size(len(living)) > len(plan.members) and left is not None:
        return Waiting(f"{train}; this one takes part in the next round", left)
    members = {member.key for member in plan.members}
    spares = sum(p.status.key not in members for p in living)
    asked = f" ({rules.spares} asked for)" if rules.spares else ""
    return Waiting(f"{train}; this one waits to step in, {counted(spares, 'spare')} in all{asked}")
