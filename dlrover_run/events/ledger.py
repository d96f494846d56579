"""Where the time of a job went: each microsecond of each worker's place belongs to one phase. Pure.

A *place* is one local rank of one agent, from the agent's begin to its end; the worker in it changes with each round.
The segments of a place follow each other without a gap or an overlap, whatever the events are, so the phases always add
up to the wall clock. What the log cannot show (the end of a killed agent, events that did not fit on the disk, files
that were rotated away) is UNKNOWN, and is not guessed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from dlrover_run.events.reader import AgentLog
from dlrover_run.events.records import (
    AgentEnded,
    CheckEnded,
    CheckpointSeen,
    CheckStarted,
    Event,
    JobEnded,
    LogGap,
    LogOpened,
    NodeWaiting,
    RoundClosed,
    RoundFormed,
    StopRequested,
    WorkerExited,
    WorkerProgress,
    WorkerReady,
    WorkerResumed,
    WorkerStalled,
    WorkerStarted,
)

MICROSECONDS = 1_000_000


class TimePhase(enum.StrEnum):
    """What a place is doing.

    START: the agent and the processes of the first round begin. RENDEZVOUS: the node has no ranks, and waits for other
    nodes or for its coordinator. CHECK: the health check. IMPORT: a worker runs, and has not reached its store. INIT:
    it has, and its first step is not done. TRAIN: it works. STALLED: it makes no progress. LOST: it worked, and the
    result was lost with its round, as the last checkpoint is older. RESTART: its round has ended, and the worker of the
    next one does not run yet. STOP: its work is done or has to end.
    """

    START = "start"
    RENDEZVOUS = "rendezvous"
    CHECK = "check"
    IMPORT = "import"
    INIT = "init"
    TRAIN = "train"
    STALLED = "stalled"
    LOST = "lost"
    RESTART = "restart"
    STOP = "stop"
    UNKNOWN = "unknown"


_STAGES = {"script": TimePhase.IMPORT, "store": TimePhase.INIT, "step": TimePhase.TRAIN}


@dataclass(frozen=True)
class Segment:
    """One phase of a place, from `start` to `end` in microseconds of the host's monotonic clock."""

    start: int
    end: int
    phase: TimePhase


@dataclass(frozen=True)
class PlaceTimes:
    """The time of one local rank of one agent."""

    opened: LogOpened
    local_rank: int
    segments: tuple[Segment, ...]

    @property
    def wall(self) -> int:
        """Microseconds from the first to the last."""
        return self.segments[-1].end - self.segments[0].start if self.segments else 0

    def total(self, phase: TimePhase) -> int:
        """Microseconds in one phase."""
        return sum(each.end - each.start for each in self.segments if each.phase is phase)


@dataclass(frozen=True)
class Ledger:
    """The time of a job. `has_checkpoints` is False if no checkpoint is in the log, so that LOST cannot be known."""

    places: tuple[PlaceTimes, ...]
    has_checkpoints: bool = False

    @property
    def wall(self) -> int:
        """Microseconds of all places."""
        return sum(place.wall for place in self.places)

    def totals(self) -> dict[TimePhase, int]:
        """Microseconds of all places in each phase."""
        return {phase: sum(place.total(phase) for place in self.places) for phase in TimePhase}

    @property
    def ettr(self) -> float | None:
        """The effective training time ratio: the part of the time in which work was done that was not lost."""
        return self.totals()[TimePhase.TRAIN] / self.wall if self.wall else None


def build_ledger(logs: Sequence[AgentLog], until: datetime | None = None, running: bool = False) -> Ledger:
    """The ledger of a job from the logs of its agents.

    The time of an agent without an end lasts to `until`, or to its last event. It is unknown from its last event on,
    unless the caller knows that the agent is `running`: then its last phase continues.
    """
    places = [place for log in logs for place in agent_times(log, until, running)]
    return Ledger(tuple(places), any(isinstance(event, CheckpointSeen) for log in logs for event in log.events))


def agent_times(log: AgentLog, until: datetime | None = None, running: bool = False) -> list[PlaceTimes]:
    """The time of each place of one agent."""
    began = microseconds(log.opened.began)
    account = _Account(log, began)
    for event in log.events:
        account.add(event)
    end = account.now
    if log.ended is None and until is not None:
        end += max(0, microseconds((until - log.last.time).total_seconds()))
    account.close(end, running or log.ended is not None)
    return [
        PlaceTimes(log.opened, local_rank, _joined(place.segments)) for local_rank, place in enumerate(account.places)
    ]


def microseconds(seconds: float) -> int:
    """Whole microseconds."""
    return round(seconds * MICROSECONDS)


class _Place:
    """One local rank while events are added. `segments` cover the time up to `since`, from which on `phase` holds."""

    def __init__(self, began: int, phase: TimePhase) -> None:
        self.segments: list[Segment] = []
        self.since = began
        self.phase = phase
        self.live = False

    def enter(self, now: int, phase: TimePhase) -> None:
        """Begin another phase."""
        if now > self.since:
            self.segments.append(Segment(self.since, now, self.phase))
            self.since = now
        self.phase = phase

    def lose(self, since: int) -> None:
        """What was worked from then on is lost."""
        changed: list[Segment] = []
        for each in self.segments:
            if each.phase is not TimePhase.TRAIN or each.end <= since:
                changed.append(each)
                continue
            if each.start < since:
                changed.append(Segment(each.start, since, TimePhase.TRAIN))
            changed.append(Segment(max(each.start, since), each.end, TimePhase.LOST))
        self.segments = changed


class _Account:
    """Adds the events of one agent in their order."""

    def __init__(self, log: AgentLog, began: int) -> None:
        self.now = began
        self._observes = bool(log.opened.stages)
        self._checkpoint: int | None = None
        self._has_formed = False
        self._broken = False
        self._stops = False
        self.places = [
            _Place(began, TimePhase.UNKNOWN if log.torn_head else TimePhase.START) for _ in range(log.opened.workers)
        ]

    def add(self, event: Event) -> None:
        """Account for the time up to an event. A clock that went back does not: that time has been accounted for."""
        before, self.now = self.now, max(self.now, microseconds(event.mono))
        match event:
            case LogGap():
                # Until an event shows what the places do now.
                for place in self.places:
                    place.enter(before, TimePhase.UNKNOWN)
            case StopRequested() | JobEnded():
                if isinstance(event, JobEnded) and event.phase == "failed":
                    self._break()
                self._stops = True
                self._enter(self.places, TimePhase.STOP)
            case AgentEnded():
                self._enter(self.places, TimePhase.STOP)
            case CheckpointSeen():
                self._checkpoint = self.now
            case WorkerExited():
                self._exit(event)
            case _ if self._stops:
                pass
            case NodeWaiting() | CheckEnded():
                self._enter(self._idle(), TimePhase.RENDEZVOUS)
            case CheckStarted():
                self._enter(self._idle(), TimePhase.CHECK)
            case RoundFormed():
                self._break()
                self._broken = False
                self._enter(self.places, TimePhase.RESTART if self._has_formed else TimePhase.START)
                self._has_formed = True
            case RoundClosed():
                self._break()
                self._enter(self.places, TimePhase.RESTART)
            case WorkerStarted(local_rank=local_rank):
                for place in self._place(local_rank):
                    place.live = True
                    place.enter(self.now, TimePhase.IMPORT if self._observes else TimePhase.TRAIN)
            case WorkerReady(local_rank=local_rank, stage=stage) if stage in _STAGES:
                self._enter(self._working(local_rank), _STAGES[stage])
            case WorkerStalled(local_rank=local_rank, since=since):
                for place in self._working(local_rank):
                    place.enter(max(place.since, min(self.now, microseconds(since))), TimePhase.STALLED)
            case WorkerResumed(local_rank=local_rank):
                self._enter(self._working(local_rank), TimePhase.TRAIN)
            case WorkerProgress(local_rank=local_rank):
                unknown = [place for place in self._working(local_rank) if place.phase is TimePhase.UNKNOWN]
                self._enter(unknown, TimePhase.TRAIN)

    def close(self, end: int, known: bool) -> None:
        """Account for the time after the last event; unless its phase is `known`, it is not that of the last event."""
        for place in self.places:
            place.enter(self.now, place.phase if known else TimePhase.UNKNOWN)
            place.enter(end, place.phase)

    def _exit(self, event: WorkerExited) -> None:
        for place in self._place(event.local_rank):
            place.live = False
            if self._stops or (event.code == 0 and not event.stopped_with):
                place.enter(self.now, TimePhase.STOP)
            else:
                place.enter(self.now, TimePhase.RESTART)
        if event.failed and not self._stops:
            # The other workers of the round only wait for the failed one from now on.
            self._break()
            self._enter([place for place in self.places if place.live], TimePhase.RESTART)

    def _break(self) -> None:
        """The round has ended without success: work after the last checkpoint is lost, once for each round."""
        if self._broken or not self._has_formed:
            return
        self._broken = True
        for place in self.places:
            if place.phase is TimePhase.TRAIN:
                place.enter(self.now, TimePhase.RESTART)
            if self._checkpoint is not None:
                place.lose(self._checkpoint)

    def _enter(self, places: Iterable[_Place], phase: TimePhase) -> None:
        for place in places:
            place.enter(self.now, phase)

    def _idle(self) -> list[_Place]:
        return [place for place in self.places if not place.live]

    def _place(self, local_rank: int) -> list[_Place]:
        """The place of a local rank; none for a number that the agent does not have."""
        return [self.places[local_rank]] if 0 <= local_rank < len(self.places) else []

    def _working(self, local_rank: int) -> list[_Place]:
        """The place of a worker, while its round has not ended."""
        return [] if self._broken else [place for place in self._place(local_rank) if place.live]


def _joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """The segments, those of one phase that follow each other as one."""
    found: list[Segment] = []
    for each in segments:
        if found and found[-1].phase is each.phase:
            found[-1] = Segment(found[-1].start, each.end, each.phase)
        else:
            found.append(each)
    return tuple(found)
