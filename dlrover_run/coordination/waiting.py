"""What a node without ranks waits for: which nodes are here, which are missing, and for how long."""

from __future__ import annotations

from collections.abc import Sequence, Set

from dlrover_run.coordination.decision import Deadline, DeadlineReason
from dlrover_run.coordination.gathering import missing_nodes
from dlrover_run.coordination.membership import Members, MemberState
from dlrover_run.coordination.model import Plan, PlanPhase, Waiting
from dlrover_run.coordination.policy import Policy
from dlrover_run.coordination.ranks import display_names
from dlrover_run.coordination.reasons import Code, chain, shown_names

_SHOWN = frozenset(DeadlineReason) - {DeadlineReason.BUDGET}
"""What a node without ranks may wait for. A restart that no longer counts changes nothing for it."""


def wait_status(policy: Policy, plan: Plan, members: Members, deadlines: Sequence[Deadline], now: float) -> Waiting:
    """What every node without ranks waits for; `deadlines` are those of the last decision."""
    rules = policy.rules
    left = _left(deadlines, _SHOWN, now)
    own = policy.waiting(plan, members, left, now)
    if own is not None:
        return own
    alive = policy.eligible(plan, members)
    if plan.phase is PlanPhase.TRAINING:
        return _spare(policy, plan, alive, deadlines, now)
    wanted = f"{rules.min_size}" if rules.min_size == rules.max_size else f"{rules.min_size} to {rules.max_size}"
    here = Code.NODES_OF(number=len(alive), wanted=wanted)
    hosts = shown_names(display_names(plan, alive))
    named = (Code.NAMED(names=hosts),) if hosts else ()
    return Waiting(chain(policy.removals(plan, members), here, *named, *missing_nodes(rules, plan, alive)), left)


def _left(deadlines: Sequence[Deadline], reasons: Set[DeadlineReason], now: float) -> float | None:
    """Seconds until the first deadline of one of these kinds; None when there is none."""
    return min((max(0.0, deadline.at - now) for deadline in deadlines if deadline.reason in reasons), default=None)


def _spare(policy: Policy, plan: Plan, alive: list[MemberState], deadlines: Sequence[Deadline], now: float) -> Waiting:
    """What a node without ranks waits for while a round runs."""
    rules = policy.rules
    train = Code.TRAINING(number=len(plan.members))
    joins_in = _left(deadlines, {DeadlineReason.SCALE_UP}, now)
    of_policy = (deadline for deadline in deadlines if deadline.reason is DeadlineReason.POLICY)
    held = min(of_policy, default=None, key=lambda deadline: deadline.at)
    watched = None if held is None else policy.watch_reason(held, joining=joins_in is not None)
    if joins_in is not None:
        return Waiting((train, watched or Code.JOINS_NEXT_ROUND()), joins_in)
    if held is not None and watched is not None:
        return Waiting((train, watched), max(0.0, held.at - now))
    members = {member.key for member in plan.members}
    spares = sum(state.report.key not in members for state in alive)
    spare = Code.SPARE_OF(number=spares, wanted=rules.spares) if rules.spares else Code.SPARE(number=spares)
    return Waiting((train, spare))
