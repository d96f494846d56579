"""What an agent does next: a pure function of the plan, its workers and what it was asked.

The loop around it carries one action out and asks again, so that only the latest state counts and no order of events
can be forgotten.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dlrover_run.coordination.records import PlanPhase


class Action(enum.Enum):
    """One step of the agent."""

    WAIT = "wait for something to change"
    START = "start the workers of the plan's round"
    STOP = "stop the workers that run"
    LEAVE = "end the agent"


@dataclass(frozen=True)
class Situation:
    """All that the next action depends on.

    `group_round` is the round of the last group that was started, 0 before the first; `live` whether any worker of it
    still runs; `asked_to_end` whether a signal or the loss of the launcher tells this node to go.
    """

    plan_phase: PlanPhase
    plan_round: int
    group_round: int
    live: bool
    asked_to_end: bool


def reconcile(situation: Situation) -> Action:
    """The action that brings this node nearer to the plan."""
    over = situation.asked_to_end or situation.plan_phase in (PlanPhase.FINISHED, PlanPhase.FAILED)
    if over:
        return Action.STOP if situation.live else Action.LEAVE
    if situation.plan_phase is PlanPhase.TRAINING and situation.group_round != situation.plan_round:
        return Action.STOP if situation.live else Action.START
    return Action.WAIT
