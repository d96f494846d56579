"""What deciding comes to: the plan that holds now, and when to look again."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from dlrover_run.coordination.records import Plan, PlanPhase


class Decision(NamedTuple):
    """The plan that holds now, the job time at which to decide again should no status come before that, and lines for
    the person who reads the log of whoever decides, to be said once the plan is stored."""

    plan: Plan
    wake_at: float | None = None
    lines: tuple[str, ...] = ()


def changed(plan: Plan, now: float, **changes: Any) -> Plan:
    """The plan with those changes, written at job time `now`."""
    return msgspec.structs.replace(plan, clock=now, **changes)


def over(plan: Plan, now: float, phase: PlanPhase, reason: str) -> Decision:
    """The job ends."""
    return Decision(changed(plan, now, phase=phase, since=now, reason=reason))


def soonest(*times: float | None) -> float | None:
    """The earliest of those times that there are."""
    return min((time for time in times if time is not None), default=None)
