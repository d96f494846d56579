"""The begins and ends of a log as pairs. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dlrover_run.events.records import ENDS, AgentEnded, Event, span_key

_BEGIN_OF = {end: begin for begin, end in ENDS.items()}


@dataclass(frozen=True)
class Span:
    """What lasted from one event to another. `end` is None while it lasts, and where the log does not show its end."""

    begin: Event
    end: Event | None = None

    @property
    def seconds(self) -> float | None:
        """How long it lasted."""
        return None if self.end is None else max(0.0, self.end.mono - self.begin.mono)


def spans(events: Iterable[Event]) -> list[Span]:
    """The spans of one agent, in the order of their begins.

    A second begin of the same thing ends nothing: the first one stays open, because its end was not written. With the
    end of the agent the span of the agent alone ends.
    """
    found: list[Span] = []
    places: dict[tuple[object, ...], int] = {}
    for event in events:
        kind = type(event)
        if kind in ENDS:
            places[(kind, *span_key(kind, event))] = len(found)
            found.append(Span(event))
        elif (begin := _BEGIN_OF.get(kind)) is not None:
            place = places.pop((begin, *span_key(begin, event)), None)
            if place is not None:
                found[place] = Span(found[place].begin, event)
    return found


def is_complete(events: Iterable[Event]) -> bool:
    """Whether the agent has written its end."""
    return any(isinstance(event, AgentEnded) for event in events)
