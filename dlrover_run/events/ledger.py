"""Where the time of a job went: each microsecond of each worker's place belongs to one phase. Pure.

A *place* is one local rank of one agent, from the agent's begin to its end; the worker in it changes with each round.
In a job of `tf-ps-run` it is one role and rank, from where a task of it first runs on that agent.
The segments of a place follow each other without a gap or an overlap, whatever the events are, so the phases always add
up to the wall clock. What the log cannot show (the end of a killed agent, events that did not fit on the disk, files
that were rotated away) is UNKNOWN, and is not guessed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec

from dlrover_run.events.reader import AgentLog
from dlrover_run.events.records import (
    AgentEnded,
    CheckEnded,
    CheckpointRestored,
    CheckpointSeen,
    CheckStarted,
    DevicesFreed,
    Event,
    JobEnded,
    LogGap,
    LogOpened,
    NodeWaiting,
    RoundClosed,
    RoundFormed,
    StopRequested,
    WorkerExited,
    WorkerKept,
    WorkerProgress,
    WorkerReady,
    WorkerResumed,
    WorkerStalled,
    WorkerStarted,
)
from dlrover_run.events.timeline import Timeline, TimePhase, TimeSegment, joined, microseconds
from dlrover_run.words.reasons import Code

_STAGES = {"store": TimePhase.INIT, "step": TimePhase.TRAIN}

WORKS_AFTER = 60.0
"""Seconds after which a worker that has ended without reaching any stage counts as one that worked."""


@dataclass(frozen=True)
class PlaceTimes:
    """The time of one local rank of one agent."""

    opened: LogOpened
    local_rank: int
    segments: tuple[TimeSegment, ...]

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
        """The effective training time ratio: the part of the time in which work was done that was not lost. The time of
        spares is left out."""
        totals = self.totals()
        wall = self.wall - totals[TimePhase.SPARE]
        return totals[TimePhase.TRAIN] / wall if wall else None


def build_ledger(logs: Sequence[AgentLog], until: datetime | None = None, running: bool = False) -> Ledger:
    """The ledger of a job from the logs of its agents.

    The time of an agent without an end lasts to `until`, or to its last event. It is unknown from its last event on,
    unless the caller knows that the agent is `running`: then its last phase continues.
    """
    places = [
        place for log in logs for place in agent_times(log, until, running, elsewhere=checkpoints_elsewhere(logs, log))
    ]
    return Ledger(tuple(places), any(_is_checkpoint(event) for log in logs for event in log.events))


def checkpoints_elsewhere(logs: Iterable[AgentLog], log: AgentLog) -> list[Event]:
    """The events of the other agents by which work is not lost, as on the clock of this one: a checkpoint is one of the
    job, and so is the state of a worker that keeps its process."""
    others = (event for other in logs if other is not log for event in other.events)
    found = [event for event in others if _is_checkpoint(event) or isinstance(event, WorkerKept)]
    head = log.opened
    return [
        msgspec.structs.replace(event, mono=head.mono + (event.time - head.time).total_seconds())
        for event in sorted(found, key=lambda event: event.time)
    ]


def _is_checkpoint(event: Event) -> bool:
    return isinstance(event, CheckpointSeen | CheckpointRestored)


def agent_times(
    log: AgentLog, until: datetime | None = None, running: bool = False, elsewhere: Sequence[Event] = ()
) -> list[PlaceTimes]:
    """The time of each place of one agent. `elsewhere` is what `checkpoints_elsewhere` returns."""
    began = microseconds(log.opened.began)
    account = _Account(log, began)
    for event in _in_order(log.events, elsewhere):
        account.add(event)
    end = account.now
    if log.ended is None and until is not None:
        end += max(0, microseconds((until - log.last.time).total_seconds()))
    account.close(end, running or log.ended is not None)
    return [
        PlaceTimes(log.opened, local_rank, joined(place.segments)) for local_rank, place in enumerate(account.places)
    ]


def _in_order(own: Iterable[Event], elsewhere: Iterable[Event]) -> Iterator[Event]:
    """The events of one agent in their order, and those of other agents between them, but not after the last."""
    others = deque(elsewhere)
    for event in own:
        while others and others[0].mono <= event.mono:
            yield others.popleft()
        yield event


class _Account:
    """Adds the events of one agent in their order."""

    def __init__(self, log: AgentLog, began: int) -> None:
        self.now = began
        self._ready_phases = _ready_phases(log)
        # From its start.
        self._first_phase = TimePhase.IMPORT if self._ready_phases else TimePhase.TRAIN
        self._checkpoints: list[tuple[int, int | None]] = []
        # The time whose work is lost, unless a worker keeps it.
        self._at_stake: tuple[int, int] | None = None
        self._has_formed = False
        self._broken = False
        self._stops = False
        # What a place does once its worker has ended, where the node waits already: the coordinator says so first.
        self._waits_in: TimePhase | None = None
        self._first_version: int | None = None
        at_first = TimePhase.UNKNOWN if log.torn_head else TimePhase.START
        self._grows = log.opened.workers == 0
        # What a task is doing that has not been here: the agent has begun, and waits for other nodes.
        self._next = Timeline(began, at_first)
        self.places = [Timeline(began, at_first) for _ in range(log.opened.workers)]

    def add(self, event: Event) -> None:
        """Account for the time up to an event. A clock that went back does not: that time has been accounted for."""
        before, self.now = self.now, max(self.now, microseconds(event.mono))
        match event:
            case LogGap():
                # Until an event shows what the places do now.
                for place in self._all:
                    place.enter(before, TimePhase.UNKNOWN)
            case StopRequested() | JobEnded():
                if isinstance(event, JobEnded) and event.phase == "failed":
                    self._break()
                self._stops = True
                self._enter(self._all, TimePhase.STOP)
            case AgentEnded():
                self._enter(self._all, TimePhase.STOP)
            case CheckpointSeen(step=step):
                self._checkpoints.append((self.now, step))
            case CheckpointRestored(step=step):
                self._restore(step)
            case WorkerKept():
                self._at_stake = None
            case WorkerExited():
                self._exit(event)
            case _ if self._stops:
                pass
            case NodeWaiting() if is_spare(event):
                self._wait(TimePhase.SPARE)
            case NodeWaiting() | CheckEnded():
                self._wait(TimePhase.RENDEZVOUS)
            case CheckStarted():
                self._wait(TimePhase.CHECK)
            case RoundFormed():
                self._break()
                self._broken = False
                self._enter(self.places, TimePhase.RESTART if self._has_formed else TimePhase.START)
                self._has_formed = True
            case RoundClosed():
                self._break()
                self._enter(self.places, TimePhase.RESTART)
            case DevicesFreed(since=since):
                self._enter(self._idle(), TimePhase.DEVICE, since)
                self._enter(self._idle(), TimePhase.RESTART)
            case WorkerStarted():
                self._start(event)
            case WorkerReady(local_rank=local_rank, stage=stage, since=since) if stage in self._ready_phases:
                self._enter(self._working(local_rank), self._ready_phases[stage], since)
            case WorkerStalled(local_rank=local_rank, since=since):
                self._enter(self._working(local_rank), TimePhase.STALLED, since)
            case WorkerResumed(local_rank=local_rank):
                self._enter(self._working(local_rank), TimePhase.TRAIN)
            case WorkerProgress(local_rank=local_rank):
                unknown = [place for place in self._working(local_rank) if place.phase is TimePhase.UNKNOWN]
                self._enter(unknown, TimePhase.TRAIN)

    def close(self, end: int, known: bool) -> None:
        """Account for the time after the last event; unless its phase is `known`, it is not that of the last event."""
        self._settle()
        for place in self.places:
            if place.role and place.phase is TimePhase.RESTART:
                # The task did not come back: it runs on another node, or is not needed any more.
                place.phase = TimePhase.STOP
            place.enter(self.now, place.phase if known else TimePhase.UNKNOWN)
            place.enter(end, place.phase)

    def _wait(self, phase: TimePhase) -> None:
        """The node has no ranks; places whose workers still end follow with their exit."""
        self._waits_in = phase
        self._enter(self._idle(), phase)

    def _start(self, event: WorkerStarted) -> None:
        self._waits_in = None
        if self._grows and event.local_rank == len(self.places):
            if self._first_version is None:
                self._first_version = event.round
            if event.round == self._first_version:
                self.places.append(Timeline(self._next.since, self._next.phase, self._next.segments))
            else:
                self.places.append(Timeline(self.now, TimePhase.START))
        for place in self._place(event.local_rank):
            place.live, place.role, place.trains = True, event.role, event.trains
            self._enter([place], self._first_phase, event.since)

    def _exit(self, event: WorkerExited) -> None:
        for place in self._place(event.local_rank):
            place.live = False
            done = self._stops or (event.code == 0 and not event.stopped_with)
            self._enter([place], TimePhase.STOP if done else self._waits_in or TimePhase.RESTART, event.since)
        if event.failed and not self._stops and not event.role:
            # The other workers of the round only wait for the failed one from now on.
            self._break()
            self._enter([place for place in self.places if place.live], TimePhase.RESTART)

    def _break(self) -> None:
        """The round has ended without success: work after the last checkpoint is lost, once for each round."""
        if self._broken or not (self._has_formed or self._grows):
            return
        self._broken = not self._grows
        for place in self.places:
            if place.phase is TimePhase.TRAIN:
                place.enter(self.now, TimePhase.RESTART)
        self._settle()
        if self._checkpoints:
            self._at_stake = self._checkpoints[-1][0], self.now

    def _settle(self) -> None:
        """No worker has kept what was at stake."""
        if self._at_stake is not None:
            self._lose(*self._at_stake)
            self._at_stake = None

    def _restore(self, step: int) -> None:
        """The model is that of the last checkpoint up to this step, or is as it was at the beginning."""
        found = (at for at, saved in reversed(self._checkpoints) if saved is not None and saved <= step)
        self._settle()
        self._lose(next(found, 0), self.now)

    def _lose(self, since: int, until: int) -> None:
        for place in self.places:
            if place.trains:
                place.lose(since, until)

    def _enter(self, places: Iterable[Timeline], phase: TimePhase, since: float | None = None) -> None:
        """They are in another phase, `since` a time before this event if one is given."""
        at = self.now if since is None else min(self.now, microseconds(since))
        for place in places:
            place.enter(at, phase)

    @property
    def _all(self) -> list[Timeline]:
        return [*self.places, self._next]

    def _idle(self) -> list[Timeline]:
        return [place for place in self._all if not place.live]

    def _place(self, local_rank: int) -> list[Timeline]:
        """The place of a local rank; none for a number that the agent does not have."""
        return [self.places[local_rank]] if 0 <= local_rank < len(self.places) else []

    def _working(self, local_rank: int) -> list[Timeline]:
        """The place of a worker, while its round has not ended."""
        return [] if self._broken else [place for place in self._place(local_rank) if place.live]


def knows_steps(logs: Iterable[AgentLog]) -> bool:
    """Whether the logs show the first steps of workers. Else the time before them, imports for example, counts as
    training, so that the ratio is an upper bound."""
    return any("step" in _ready_phases(log) for log in logs)


def _ready_phases(log: AgentLog) -> dict[str, TimePhase]:
    """What a worker does from each stage on. The stages are those that a worker of this agent has reached and, until
    one has worked without doubt, those that the agent observes of every script."""
    observed = {event.stage for event in log.events if isinstance(event, WorkerReady)}
    if not _has_worked(log):
        observed.update(log.opened.stages)
    if "step" not in observed:
        return {"store": TimePhase.TRAIN} if "store" in observed else {}
    return {stage: phase for stage, phase in _STAGES.items() if stage in observed}


def _has_worked(log: AgentLog) -> bool:
    """Whether a worker has succeeded, or has lived for longer than one that cannot start."""
    began: dict[int, float] = {}
    for event in log.events:
        match event:
            case WorkerStarted(local_rank=local_rank, mono=mono):
                began[local_rank] = mono
            case WorkerExited(local_rank=local_rank, mono=mono):
                succeeded = event.code == 0 and not event.stopped_with
                if succeeded or mono - began.get(local_rank, mono) >= WORKS_AFTER:
                    return True
    return False


def is_spare(event: NodeWaiting) -> bool:
    """Whether a node without ranks waits while the others train, and joins no round that is due."""
    return Code.TRAINING.within(event.reasons) and not Code.JOINS_NEXT_ROUND.within(event.reasons)
