"""What a waiting node is told: who is here, who is missing, how long still."""

from __future__ import annotations

from collections.abc import Sequence, Set

from dlrover_run.coordination.decision import Deadline, DeadlineReason
from dlrover_run.coordination.membership import Members, MemberState
from dlrover_run.coordination.model import Plan, PlanPhase, Waiting
from dlrover_run.coordination.rendezvous import display_names, missing_nodes
from dlrover_run.coordination.rules import CHECK_NEVER, JobRules
from dlrover_run.coordination.text import counted, join_names
from dlrover_run.policies.health import text as health_text
from dlrover_run.policies.health.model import HealthCheck
from dlrover_run.policies.health.policy import computes_anew, computing, eligible_nodes
from dlrover_run.policies.health.round import asked, awaited, check_status, key_of
from dlrover_run.policies.parameter_servers import policy as parameter_servers

MAX_DISMISSALS = 300
"""Characters of what is told of dismissals before the words about who is missing, so that these always fit."""


_FELT = frozenset(DeadlineReason) - {DeadlineReason.BUDGET}
"""What a node without a seat may wait for. A restart that is forgiven changes nothing for it."""


def wait_status(rules: JobRules, plan: Plan, members: Members, deadlines: Sequence[Deadline], now: float) -> Waiting:
    """The words for every node without a seat; `deadlines` are those of the last decision."""
    if rules.cluster is not None:
        return parameter_servers.waiting(rules, plan, members, now)
    alive = eligible_nodes(rules, plan, members)
    if plan.phase is PlanPhase.TRAINING:
        return _beside(rules, plan, alive, deadlines, now)
    left = _left(deadlines, _FELT, now)
    if plan.check is not None:
        return _checking(plan.check, members, left, now)
    if rules.check != CHECK_NEVER and rules.size(len(alive)) and not computes_anew(rules, plan):
        silent = computing(rules, plan, alive, now)
        if silent:
            return Waiting(health_text.not_computed(display_names(plan, silent), len(alive)), left)
    wanted = f"{rules.min_size}" if rules.min_size == rules.max_size else f"{rules.min_size} to {rules.max_size}"
    here = f"{counted(len(alive), 'node')} of {wanted} {'is' if len(alive) == 1 else 'are'} here"
    hosts = join_names(display_names(plan, alive))
    missing = missing_nodes(rules, plan, alive)
    # Of one that is gone it is worth saying while the others wait for somebody in its place.
    told = (one for one in plan.health if plan.key.number == 0 or key_of(one) in members)
    dismissed = health_text.dismissal([checkup for checkup in told if checkup.dismissed])
    before = f"{dismissed[:MAX_DISMISSALS]}; " if dismissed else ""
    return Waiting(f"{before}{here}{hosts and f': {hosts}'}{missing and f'; missing: {missing}'}", left)


def _checking(check: HealthCheck, members: Members, left: float | None, now: float) -> Waiting:
    """While a check goes on: who has answered, and how each node stands."""
    waited_for = [check.nodes[place].host for place in awaited(check, members, now)]
    text = health_text.stands(check, waited_for, len(asked(check, members, now)))
    return Waiting(text, left, health_text.shown(check_status(check, members), health_text.share_of(len(members))))


def _left(deadlines: Sequence[Deadline], reasons: Set[DeadlineReason], now: float) -> float | None:
    """Seconds until the first deadline of one of these kinds; None when there is none."""
    return min((max(0.0, deadline.at - now) for deadline in deadlines if deadline.reason in reasons), default=None)


def _beside(
    rules: JobRules, plan: Plan, alive: list[MemberState], deadlines: Sequence[Deadline], now: float
) -> Waiting:
    """For a node that is here while others train."""
    train = f"{counted(len(plan.members), 'node')} {'trains' if len(plan.members) == 1 else 'train'}"
    joins_in = _left(deadlines, {DeadlineReason.SCALE_UP}, now)
    checked_in = _left(deadlines, {DeadlineReason.HEALTH}, now)
    if joins_in is not None:
        who = "this one takes" if checked_in is None else "those that have passed the node check take"
        return Waiting(f"{train}; {who} part in the next round", joins_in)
    if checked_in is not None:
        return Waiting(f"{train}; meanwhile the node check looks at those who have come", checked_in)
    members = {member.key for member in plan.members}
    spares = sum(p.report.key not in members for p in alive)
    asked = f" ({rules.spares} asked for)" if rules.spares else ""
    return Waiting(f"{train}; this one waits to step in, {counted(spares, 'spare')} in all{asked}")
