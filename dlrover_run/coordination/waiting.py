"""What a node without ranks waits for: which nodes are here, which are missing, and for how long. All waiting nodes
receive the same, at a limited rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from dlrover_run.coordination.decision import Deadline, DeadlineReason, Wait, seconds_left
from dlrover_run.coordination.gate import Gate, Step
from dlrover_run.coordination.membership import Members, MemberState
from dlrover_run.coordination.missing import is_quorum_lacking, missing_nodes
from dlrover_run.coordination.model import Plan, PlanPhase, Waiting
from dlrover_run.coordination.ranks import display_names
from dlrover_run.coordination.rules import JobRules
from dlrover_run.words.reasons import Code, chain, shown_names

INTERVAL = 1.0
"""The minimum number of seconds between two status messages to the nodes of a job."""

NODES_PER_SECOND = 500
"""Nodes to which the status is sent in a second on average, so that it never keeps a master from its work."""

SAME_MOMENT = 0.5
"""Seconds by which two deadlines may differ and count as one: a node counts down by itself."""


def wait_for_round(
    rules: JobRules,
    gate: Gate,
    plan: Plan,
    alive: list[MemberState],
    members: Members,
    of_gate: Wait | None,
    deadlines: Sequence[Deadline],
    now: float,
) -> Waiting:
    """What every node waits for while no round runs. `alive` are those of which it is formed."""
    own = None if of_gate is None else of_gate(deadlines, now)
    if own is not None:
        return own
    wanted = f"{rules.min_size}" if rules.min_size == rules.max_size else f"{rules.min_size} to {rules.max_size}"
    here = Code.NODES_OF(number=len(alive), wanted=wanted)
    hosts = shown_names(display_names(plan, alive))
    named = (Code.NAMED(names=hosts),) if hosts else ()
    quorum = (Code.QUORUM(number=plan.quorum),) if is_quorum_lacking(plan, alive) else ()
    missing = missing_nodes(rules, plan, alive)
    reasons = chain(gate.removals(plan, members), here, *named, *quorum, *missing)
    return Waiting(reasons, seconds_left(deadlines, now))


def is_full(rules: JobRules, plan: Plan) -> bool:
    """Whether a round runs that has as many nodes as it may have."""
    return plan.phase is PlanPhase.TRAINING and len(plan.members) >= rules.max_size


def wait_as_spare(
    rules: JobRules,
    gate: Gate,
    plan: Plan,
    members: Members,
    watched: Step | None,
    deadlines: Sequence[Deadline],
    now: float,
) -> Waiting:
    """What a node without ranks waits for while a round runs: a `Wait` of `train`. `watched` is what the gate did."""
    train = Code.TRAINING(number=len(plan.members))
    joins_in = seconds_left(deadlines, now, {DeadlineReason.SCALE_UP})
    checked_in = None if watched is None else seconds_left(watched.deadlines, now)
    alone, joining = (None, None) if watched is None or watched.spare is None else watched.spare
    if joins_in is not None:
        joins = Code.JOINS_NEXT_ROUND() if plan.change is None else Code.JOINS_AT_CHECKPOINT()
        return Waiting((train, (joining if checked_in is not None else None) or joins), joins_in)
    if checked_in is not None and alone is not None:
        return Waiting((train, alone), checked_in)
    in_round = {member.key for member in plan.members}
    alive = gate.healthy(plan, members)
    others = [state for state in alive if state.report.key not in in_round]
    preparing = sum(state.report.preparing for state in others)
    if preparing and rules.size(len(alive)) > len(plan.members):
        return Waiting((train, Code.NODES_PREPARE(number=preparing)))
    spares = len(others)
    is_resized = plan.desired is not None or plan.wanted_nodes  # Then --nnodes counts this node too.
    if not rules.spares and not is_resized and is_full(rules, plan):
        return Waiting((train, Code.NOT_REQUESTED()))
    spare = Code.SPARE_OF(number=spares, wanted=rules.spares) if rules.spares else Code.SPARE(number=spares)
    return Waiting((train, spare))


class WaitingThrottle:
    """Renews the status of waiting nodes, which `compute` returns for a time. `outdated` is set when something has
    arrived since the last status."""

    def __init__(self, compute: Callable[[float], Waiting]) -> None:
        self._compute = compute
        self._waiting = Waiting(())
        self._deadline: float | None = None
        self._next = -math.inf
        self.outdated = True

    @property
    def due(self) -> float | None:
        """When to renew the status; None when nothing has changed."""
        return self._next if self.outdated else None

    def renew(self, now: float, nodes: int, at_once: bool) -> bool:
        """Renew the status if that is due, or in any case `at_once`; return whether it has changed."""
        if not at_once and (not self.outdated or now < self._next):
            return False
        self.outdated = False
        self._next = now + max(INTERVAL, nodes / NODES_PER_SECOND)
        waiting = self._compute(now)
        before, deadline = self._waiting, self._deadline
        self._waiting = msgspec.structs.replace(waiting, seconds=None)
        self._deadline = None if waiting.seconds is None else now + waiting.seconds
        return before != self._waiting or _differ(deadline, self._deadline)

    def message(self, now: float) -> Waiting:
        left = None if self._deadline is None else max(0.0, self._deadline - now)
        return msgspec.structs.replace(self._waiting, seconds=left)


def _differ(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is not other
    return abs(one - other) > SAME_MOMENT
