"""The ledger of this agent's own time while it runs: the events go on to the log, and the phases are those of `ledger`.

Nothing is imported for it before the first figures are wanted: a launch does not wait for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from dlrover_run.coordination.records.activity import PhaseTimes
from dlrover_run.events.records import (
    CheckpointSeen,
    DeviceErrorSeen,
    Event,
    Events,
    LogOpened,
    RoundClosed,
    RoundFormed,
    ScaleCommandEnded,
    StragglerFound,
    StragglerGone,
    WorkerProgress,
    WorkerReady,
    WorkerResources,
    WorkerResumed,
    WorkerStalled,
)

if TYPE_CHECKING:
    from dlrover_run.events.ledger import PlaceTimes
    from dlrover_run.events.timeline import TimePhase

MAX_CHECKPOINTS = 64
"""Checkpoints that are kept: a worker that goes back to an earlier one has its work from there on counted as done."""

MAX_EVENTS = 2000
"""Events that are kept: with more, rounds and stalls that are over are added up and forgotten."""


NO_PHASE = (DeviceErrorSeen, WorkerProgress, WorkerResources, StragglerFound, StragglerGone, ScaleCommandEnded)
"""Events that begin no phase."""


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
        self._past: dict[TimePhase, int] = {}

    def emit(self, event: Event) -> None:
        self._log.emit(event)
        if isinstance(event, NO_PHASE):
            return
        if isinstance(event, RoundFormed) and len(self._events) >= MAX_EVENTS:
            self._add_up()
        self._events.append(msgspec.structs.replace(event, mono=self._clock()))
        self.is_behind = True
        if isinstance(event, CheckpointSeen):
            self._checkpoints += 1
            if self._checkpoints > MAX_CHECKPOINTS:
                oldest = next(place for place, one in enumerate(self._events) if isinstance(one, CheckpointSeen))
                del self._events[oldest]
                self._checkpoints -= 1
        elif isinstance(event, WorkerResumed) and len(self._events) > MAX_EVENTS:
            self._forget_stall()

    def close(self) -> bool:
        return self._log.close()

    @property
    def path(self) -> str:
        return self._log.path

    def lines(self) -> list[bytes]:
        return self._log.lines()

    def times(self) -> PhaseTimes:
        """Where the time of the workers of this node went, until now."""
        self.is_behind = False
        places = self._places()
        now = [place.segments[-1].phase for place in places if place.segments]
        totals = self._totals(places)
        return PhaseTimes(
            seconds={phase.value: round(total / 1e6, 3) for phase, total in totals.items() if total >= 1000},
            places={phase.value: now.count(phase) for phase in dict.fromkeys(now)},
        )

    def _places(self) -> list[PlaceTimes]:
        from dlrover_run.events.ledger import agent_times
        from dlrover_run.events.reader import AgentLog

        # An event without a meaning: the phases that hold now reach up to it. A microsecond shows one that begins now.
        log = AgentLog(self._opened, (*self._events, Event(mono=self._clock() + 1e-6)))
        return agent_times(log, running=True)

    def _totals(self, places: list[PlaceTimes]) -> dict[TimePhase, int]:
        """Microseconds in each phase, those of the rounds that were added up included."""
        from dlrover_run.events.ledger import Ledger

        return {phase: spent + self._past.get(phase, 0) for phase, spent in Ledger(tuple(places)).totals().items()}

    def _forget_stall(self) -> None:
        """Keep of the first stall that is over its time alone: a round of weeks may have very many."""
        from dlrover_run.events.timeline import TimePhase, microseconds

        begun: dict[int, int] = {}
        for place, event in enumerate(self._events):
            if isinstance(event, WorkerStalled):
                begun.setdefault(event.local_rank, place)
            elif isinstance(event, WorkerResumed) and (first := begun.get(event.local_rank)) is not None:
                stalled = self._events[first]
                assert isinstance(stalled, WorkerStalled), "it was just found"
                spent = microseconds(event.mono) - microseconds(stalled.since)
                for phase, change in ((TimePhase.STALLED, spent), (TimePhase.TRAIN, -spent)):
                    self._past[phase] = self._past.get(phase, 0) + change
                del self._events[place], self._events[first]
                return

    def _add_up(self) -> None:
        """Keep of all rounds until now the time of each phase, the last checkpoint, and that there were rounds."""
        self._past = self._totals(self._places())
        now = self._clock()
        stages = {event.stage for event in self._events if isinstance(event, WorkerReady)}
        stages.update(self._opened.stages)
        self._opened = msgspec.structs.replace(self._opened, began=now, stages=tuple(sorted(stages)))
        kept = [event for event in self._events if isinstance(event, CheckpointSeen)][-1:]
        formed = next((event for event in reversed(self._events) if isinstance(event, RoundFormed)), None)
        if formed is not None:
            closed = RoundClosed(round=formed.round, epoch=formed.epoch, failed=False, mono=now)
            self._events = [msgspec.structs.replace(formed, mono=now), closed, *kept]
        else:
            self._events = [*kept]
        self._checkpoints = len(kept)
