"""The phases of one place over time, in segments that follow each other without a gap or an overlap. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

MICROSECONDS = 1_000_000


class TimePhase(enum.StrEnum):
    """What a place is doing.

    START: the agent and the processes of the first round begin. RENDEZVOUS: the node has no ranks, and waits for other
    nodes or for its coordinator. CHECK: the node check. IMPORT: a worker runs, and has not reached its store, or,
    where the log does not show that, its first step. INIT: it has reached its store, and its first step is not done.
    TRAIN: it works. STALLED: it makes no progress. LOST: it worked, and the result was lost, as the last checkpoint is
    older. DEVICE: its round has ended, and a process that it left behind still holds a device. RESTART: its round has
    ended, and the worker of the next one does not run yet. STOP: its work is done or has to end. SPARE: the others
    train, and it waits to step in.
    """

    START = "start"
    RENDEZVOUS = "rendezvous"
    CHECK = "check"
    IMPORT = "import"
    INIT = "init"
    TRAIN = "train"
    STALLED = "stalled"
    LOST = "lost"
    DEVICE = "device"
    RESTART = "restart"
    STOP = "stop"
    SPARE = "spare"
    UNKNOWN = "unknown"


def microseconds(seconds: float) -> int:
    """Whole microseconds."""
    return round(seconds * MICROSECONDS)


@dataclass(frozen=True)
class TimeSegment:
    """One phase of a place, from `start` to `end` in microseconds of the host's monotonic clock."""

    start: int
    end: int
    phase: TimePhase


class Timeline:
    """One local rank while events are added. `segments` cover the time up to `since`, from which on `phase` holds."""

    def __init__(self, began: int, phase: TimePhase, segments: Sequence[TimeSegment] = ()) -> None:
        self.segments = list(segments)
        self.since = began
        self.phase = phase
        self.live = False
        self.role = ""
        self.trains = True

    def enter(self, now: int, phase: TimePhase) -> None:
        """Begin another phase."""
        if now > self.since:
            self.segments.append(TimeSegment(self.since, now, self.phase))
            self.since = now
        self.phase = phase

    def lose(self, since: int, until: int) -> None:
        """What was worked from then until then is lost."""
        changed: list[TimeSegment] = []
        for each in self.segments:
            if each.phase is not TimePhase.TRAIN or each.end <= since or each.start >= until:
                changed.append(each)
                continue
            if each.start < since:
                changed.append(TimeSegment(each.start, since, TimePhase.TRAIN))
            changed.append(TimeSegment(max(each.start, since), each.end, TimePhase.LOST))
        self.segments = changed


def joined(segments: Sequence[TimeSegment]) -> tuple[TimeSegment, ...]:
    """The segments, those of one phase that follow each other as one."""
    found: list[TimeSegment] = []
    for each in segments:
        if found and found[-1].phase is each.phase:
            found[-1] = TimeSegment(found[-1].start, each.end, each.phase)
        else:
            found.append(each)
    return tuple(found)
