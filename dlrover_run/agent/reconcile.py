"""What an agent does next: a pure function of its seat, its workers and what it was asked.

The loop around it carries one action out and asks again, so that only the latest state counts and no order of events
can be forgotten.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dlrover_run.coordination.model import RoundKey


class Action(enum.Enum):
    """One step of the agent."""

    WAIT = "wait for something to change"
    START = "start the workers of the plan's round"
    STOP = "stop the workers that run"
    LEAVE = "end the agent"


@dataclass(frozen=True)
class Situation:
    """All that the next action depends on.

    `over` says that the job has ended for this node. `wanted` is the round in which it has a seat, None when it has to
    wait without one, `started` the round of the last group that was started. `live` is whether any worker of it still
    runs; `leaving` is whether a signal or the loss of the launcher tells this node to go.
    """

    over: bool
    wanted: RoundKey | None
    started: RoundKey | None
    live: bool
    leaving: bool


def reconcile(situation: Situation) -> Action:
    """The action that brings this node nearer to the plan."""
    if situation.over or situation.leaving:
        return Action.STOP if situation.live else Action.LEAVE
    if situation.wanted == situation.started:
        return Action.WAIT
    if situation.live:
        return Action.STOP
    return Action.WAIT if situation.wanted is None else Action.START
