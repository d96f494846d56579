"""The result of a decision: the plan that holds now, and the deadlines at which to decide again."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import msgspec

from dlrover_run.coordination.records.assignment import Waiting
from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.plan import Plan, PlanPart, PlanPhase
from dlrover_run.words.reasons import Reasons

MAX_STEPS = 20_000
"""Steps of one decision, more than a job has nodes or tasks. Two features that undo each other's steps would otherwise
hold up every job of a master for ever, without an exception."""


class Unsettled(RuntimeError):
    """MAX_STEPS steps were taken in one decision: a defect of one of the features of the job."""

    def __init__(self) -> None:
        super().__init__(f"a decision does not settle within {MAX_STEPS} steps")


MAX_VALUE = 120
"""Characters of a value in the debug log: a plan of a large job has thousands of members."""


class DeadlineReason(enum.Enum):
    """What happens at a deadline. What a waiting node shows follows from it, so a deadline that concerns only the
    coordinator's own counts can never be shown as a countdown."""

    JOIN = "join"
    """The first round has too few nodes: the job fails."""
    REPLACEMENT = "replacement"
    """A job that has lost nodes has too few: it fails."""
    LAST_CALL = "last call"
    """The first round begins with fewer than the most nodes."""
    LOST = "lost"
    """A node whose connection has ended counts as lost."""
    RANK0_NODE = "rank 0 node"
    """The node with rank 0 of the next round has not answered: the job fails."""
    SCALE_UP = "scale up"
    """Nodes that have come take part in a larger round."""
    CHECKPOINT = "checkpoint"
    """A planned change that admits no node is made though no checkpoint was marked."""
    BLAME = "blame"
    """The failure of a worker that only lost a peer counts."""
    BUDGET = "budget"
    """A restart no longer counts."""
    FEATURE = "feature"
    """A feature decides without what has not been reported by then."""


class Deadline(NamedTuple):
    """A job time at which something is decided though no report was received, and what that is."""

    at: float
    reason: DeadlineReason


_SHOWN = frozenset(DeadlineReason) - {DeadlineReason.BUDGET, DeadlineReason.CHECKPOINT}
"""What a node without ranks may wait for. A restart that no longer counts changes nothing for it, nor does a drain."""

Wait = Callable[[Sequence[Deadline], float], Waiting | None]
"""What nodes without ranks wait for, made from what a decision found: its owner calls it when that is shown, with the
deadlines of the decision and the job time. None if it has nothing to say."""


def seconds_left(deadlines: Sequence[Deadline], now: float, reasons: Set[DeadlineReason] = _SHOWN) -> float | None:
    """Seconds until the first deadline of one of these kinds; None when there is none."""
    return min((max(0.0, deadline.at - now) for deadline in deadlines if deadline.reason in reasons), default=None)


class Change(NamedTuple):
    """A change of the plan and its author: a feature, the engine, or what else changes a plan. As text it is a line for
    the debug log, with the fields and the features' parts that differ: each with what it was and is, as on the wire."""

    author: str
    before: Plan
    plan: Plan

    def __str__(self) -> str:
        before, plan = self.before, self.plan
        names = [name for name in Plan.__struct_fields__ if name not in ("clock", "parts")]
        pairs = [(name, getattr(before, name), getattr(plan, name)) for name in names]
        earlier = {part.feature: part for part in before.parts}
        pairs += [(f"the part of {part.feature}", earlier.get(part.feature), part) for part in plan.parts]
        found = [f"{name} from {_short(was)} to {_short(now)}" for name, was, now in pairs if was != now]
        return f"{self.author} changes {', '.join(found) or 'nothing'}"


def _short(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}..."


def changed_by(author: str, before: Plan, plan: Plan) -> tuple[Change, ...]:
    """The change from one plan to the next; none if that is the same one."""
    return () if plan is before else (Change(author, before, plan),)


class Decision(NamedTuple):
    """The plan that holds now, the deadlines at which to decide again if no report is received before, and lines for
    the coordinator's log, to be written once the plan is stored. `wait` says what nodes without ranks wait for.
    `again`: a round has ended or begun, or something that precedes it, so all that decide are asked once more in this
    decision. `changes` are those of the plan in their order, for the debug log; of an engine's decision only those that
    are not its own, as are those of the gate."""

    plan: Plan
    deadlines: tuple[Deadline, ...] = ()
    log_lines: tuple[str, ...] = ()
    wait: Wait | None = None
    again: bool = False
    changes: tuple[Change, ...] = ()

    @property
    def wake_at(self) -> float | None:
        """The earliest of the deadlines; None when there is none."""
        return min((deadline.at for deadline in self.deadlines), default=None)


def update_plan(plan: Plan, now: float, *, part: PlanPart | None = None, **changes: Any) -> Plan:
    """The plan with those changes, written at job time `now`. `part` replaces that of the same feature
    only."""
    if part is not None:
        changes["parts"] = with_part(plan.parts, part)
    return msgspec.structs.replace(plan, clock=now, **changes)


def end_job(plan: Plan, now: float, phase: PlanPhase, reasons: Reasons, **changes: Any) -> Plan:
    """The plan of a job that is over, with those further changes."""
    parts = tuple(part.at_end() for part in plan.parts)
    return update_plan(plan, now, phase=phase, since=now, reasons=reasons, parts=parts, **changes)


def deadline_if(at: float | None, reason: DeadlineReason) -> tuple[Deadline, ...]:
    """The deadline at that time; none when there is no time."""
    return () if at is None else (Deadline(at, reason),)
