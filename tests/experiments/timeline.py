"""When the fault was, when it was noticed, when there was a new world and when training went on."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from experiments.history import Round, rounds_of
from experiments.records import Began, Done, Record, Saved

LAUNCHERS_LINE = re.compile(r"(\[node \d+\] )?\d\d:\d\d:\d\d dlrover-run: ")


@dataclass(frozen=True)
class Event:
    """What happened, and when, in seconds on the monotonic clock."""

    at: float
    words: str


@dataclass(frozen=True)
class Recovery:
    """Seconds from a fault to what followed before the next one; None for what did not. The step is the first of the
    new world, or the next one where the world stayed."""

    fault: str
    to_notice: float | None
    to_new_world: float | None
    to_next_step: float | None


@dataclass
class Timeline:
    """What happened in an experiment, told by whoever made it happen, by the launchers, and by the workers."""

    name: str
    began: float
    faults: list[Event] = field(default_factory=list)
    lines: list[Event] = field(default_factory=list)

    def write(self, directory: Path, records: Sequence[Record]) -> None:
        """Write NAME.json and NAME.txt."""
        directory.mkdir(parents=True, exist_ok=True)
        events, recoveries = self.events(records), self.recoveries(records)
        told = {
            "experiment": self.name,
            "events": [{"at": round(event.at - self.began, 3), "words": event.words} for event in events],
            "recoveries": [asdict(recovery) for recovery in recoveries],
        }
        (directory / f"{self.name}.json").write_text(json.dumps(told, indent=1) + "\n")
        lines = [f"{event.at - self.began:8.3f} s  {event.words}" for event in events]
        lines += [describe(recovery) for recovery in recoveries]
        (directory / f"{self.name}.txt").write_text("\n".join(lines) + "\n")

    def events(self, records: Sequence[Record]) -> list[Event]:
        """All of it, in the order in which it happened."""
        told = [event for event in self.lines if LAUNCHERS_LINE.match(event.words)]
        faults = [Event(fault.at, f"FAULT: {fault.words}") for fault in self.faults]
        saves = [
            Event(record.at, f"checkpoint of step {record.step}") for record in records if isinstance(record, Saved)
        ]
        trained = [event for each in rounds_of(records) for event in _events_of(each, records)]
        return sorted((*told, *faults, *saves, *trained), key=lambda event: event.at)

    def recoveries(self, records: Sequence[Record]) -> list[Recovery]:
        """What each fault led to."""
        following = [*self.faults[1:], Event(math.inf, "the end")]
        return [self._recovery(fault, later.at, records) for fault, later in zip(self.faults, following, strict=False)]

    def _recovery(self, fault: Event, end: float, records: Sequence[Record]) -> Recovery:
        def first(times: Iterable[float | None]) -> float | None:
            return min((at - fault.at for at in times if at is not None and fault.at < at < end), default=None)

        rounds = rounds_of(records)
        to_new_world = first(world_at(each, records) for each in rounds)
        if to_new_world is not None:
            to_next_step = first(first_step_at(each, records) for each in rounds)
        else:
            to_next_step = first(record.at for record in records if isinstance(record, Done))
        to_notice = first(line.at for line in self.lines if LAUNCHERS_LINE.match(line.words))
        return Recovery(fault.words, to_notice, to_new_world, to_next_step)


def world_at(each: Round, records: Sequence[Record]) -> float | None:
    """When all workers of a round had met."""
    if not each.is_whole:
        return None
    return max(record.at for record in records[each.began :] if record.round == each.name and isinstance(record, Began))


def first_step_at(each: Round, records: Sequence[Record]) -> float | None:
    """When rank 0 of a round had taken its first step."""
    return next((r.at for r in records if r.round == each.name and r.rank == 0 and isinstance(r, Done)), None)


def describe(recovery: Recovery) -> str:
    """One line for a person."""
    times = {
        "the first word of a launcher": recovery.to_notice,
        "a new world": recovery.to_new_world,
        "the next step": recovery.to_next_step,
    }
    said = [f"{what} after {seconds:.2f} s" for what, seconds in times.items() if seconds is not None]
    return f"{recovery.fault}: {', '.join(said) or 'nothing'}"


def _events_of(each: Round, records: Sequence[Record]) -> list[Event]:
    events = []
    if (at := world_at(each, records)) is not None:
        nodes = ", ".join(f"rank {rank} on node {node}" for rank, node in each.nodes.items())
        onward = f"it goes on from step {each.start}" if each.start is not None else "it did not come to train"
        events.append(Event(at, f"a world of {each.world}: {nodes}; {onward}"))
    if (at := first_step_at(each, records)) is not None:
        events.append(Event(at, f"the world of {each.world} has taken its first step"))
        events.append(
            Event(records[each.worked].at, f"the world of {each.world} has taken its last step, {each.end - 1}")
        )
    return events
