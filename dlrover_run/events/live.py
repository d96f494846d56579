"""The ledger of this agent's own time while it runs: the events go on to the log, and the phases are those of `ledger`.

Nothing is imported for it before the first figures are wanted: a launch does not wait for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from dlrover_run.coordination.activity import PhaseTimes
from dlrover_run.events.records import CheckpointSeen, Event, Events, LogOpened, WorkerProgress

MAX_CHECKPOINTS = 64
"""Checkpoints that are kept: a worker that goes back to an earlier one has its work from there on counted as done."""


class LiveLedger(Events):
    """Takes the events of one agent, and passes them on to `log`. `is_behind`: a phase may have begun since `times` was
    called."""

    def __init__(self, opened: LogOpened, log: Events, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_behind = False
        self._opened = opened
        self._log = log
        self._clock = clock
        self._events: list[Event] = []
        self._checkpoints = 0

    def emit(self, event: Event) -> None:
        self._log.emit(event)
        if isinstance(event, WorkerProgress):
            return
        self._events.append(msgspec.structs.replace(event, mono=self._clock()))
        self.is_behind = True
        if isinstance(event, CheckpointSeen):
            self._checkpoints += 1
            if self._checkpoints > MAX_CHECKPOINTS:
                oldest = next(place for place, one in enumerate(self._events) if isinstance(one, CheckpointSeen))
                del self._events[oldest]
                self._checkpoints -= 1

    def close(self) -> bool:
        return self._log.close()

    def times(self) -> PhaseTimes:
        """Where the time of the workers of this node went, until now."""
        from dlrover_run.events.ledger import Ledger, agent_times
        from dlrover_run.events.reader import AgentLog

        self.is_behind = False
        # An event without a meaning: the phases that hold now reach up to it. A microsecond shows one that begins now.
        log = AgentLog(self._opened, (*self._events, Event(mono=self._clock() + 1e-6)))
        places = agent_times(log, running=True)
        now = [place.segments[-1].phase for place in places if place.segments]
        totals = Ledger(tuple(places)).totals()
        return PhaseTimes(
            seconds={phase.value: round(total / 1e6, 3) for phase, total in totals.items() if total >= 1000},
            places={phase.value: now.count(phase) for phase in dict.fromkeys(now)},
        )
