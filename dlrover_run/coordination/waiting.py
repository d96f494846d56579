"""What a node without ranks waits for: which nodes are here, which are missing, and for how long."""

from __future__ import annotations

from collections.abc import Sequence, Set

from dlrover_run.coordination.decision import Deadline, DeadlineReason
from dlrover_run.coordination.membership import Members, MemberState
from dlrover_run.coordination.model import Plan, PlanPhase, Waiting
from dlrover_run.coordination.reasons import Code, chain, shown_names
from dlrover_run.coordination.rendezvous import display_names, missing_nodes
from dlrover_run.coordination.rules import CHECK_NEVER, JobRules
from dlrover_run.policies.health import text as health_text
from dlrover_run.policies.health.model import HealthCheck
from dlrover_run.policies.health.policy import computes_anew, computing, eligible_nodes
from dlrover_run.policies.health.round import asked, awaited, check_status, key_of
from dlrover_run.policies.parameter_servers import policy as parameter_servers

MAX_DISMISSALS = 300
"""Characters of the causes of dismissals that waiting nodes are shown."""


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
    here = Code.NODES_OF(number=len(alive), wanted=wanted)
    hosts = shown_names(display_names(plan, alive))
    # Of one that is gone it is worth saying while the others wait for somebody in its place.
    told = (one for one in plan.health if plan.key.number == 0 or key_of(one) in members)
    dismissed = health_text.dismissals([checkup for checkup in told if checkup.dismissed], MAX_DISMISSALS)
    named = (Code.NAMED(names=hosts),) if hosts else ()
    return Waiting(chain(dismissed, here, *named, *missing_nodes(rules, plan, alive)), left)


def _checking(check: HealthCheck, members: Members, left: float | None, now: float) -> Waiting:
    """While a check goes on: who has answered, and how each node stands."""
    waited_for = [check.nodes[place].host for place in awaited(check, members, now)]
    reasons = health_text.answers(check, waited_for, len(asked(check, members, now)))
    return Waiting(reasons, left, health_text.shown(check_status(check, members), health_text.share_of(len(members))))


def _left(deadlines: Sequence[Deadline], reasons: Set[DeadlineReason], now: float) -> float | None:
    """Seconds until the first deadline of one of these kinds; None when there is none."""
    return min((max(0.0, deadline.at - now) for deadline in deadlines if deadline.reason in reasons), default=None)


def _beside(
    rules: JobRules, plan: Plan, alive: list[MemberState], deadlines: Sequence[Deadline], now: float
) -> Waiting:
    """For a node that is here while others train."""
    train = Code.TRAINING(number=len(plan.members))
    joins_in = _left(deadlines, {DeadlineReason.SCALE_UP}, now)
    checked_in = _left(deadlines, {DeadlineReason.HEALTH}, now)
    if joins_in is not None:
        joins = Code.JOINS_NEXT_ROUND() if checked_in is None else health_text.Code.PASSED_JOIN()
        return Waiting((train, joins), joins_in)
    if checked_in is not None:
        return Waiting((train, health_text.Code.CHECKED_DURING_TRAINING()), checked_in)
    members = {member.key for member in plan.members}
    spares = sum(p.report.key not in members for p in alive)
    spare = Code.SPARE_OF(number=spares, wanted=rules.spares) if rules.spares else Code.SPARE(number=spares)
    return Waiting((train, spare))
