"""The events of a job as spans, from what begins to what ends, and as records of what happens in between. Pure.

So OpenTelemetry shows a job: a trace with a span for each agent, and below it those of its checks, its rounds and their
workers, their stalls and stragglers. Identifiers follow from the events: what is sent again replaces what was sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import msgspec

from dlrover_run.events import records
from dlrover_run.events.reader import AgentLog
from dlrover_run.features.inspect.text import describe
from dlrover_run.words.reasons import render

Attributes = dict[str, str | int | float]

KINDS: Mapping[str, tuple[type[records.Event], type[records.Event]]] = {
    "agent": (records.LogOpened, records.AgentEnded),
    "check": (records.CheckStarted, records.CheckEnded),
    "round": (records.RoundFormed, records.RoundClosed),
    "worker": (records.WorkerStarted, records.WorkerExited),
    "stall": (records.WorkerStalled, records.WorkerResumed),
    "straggler": (records.StragglerFound, records.StragglerGone),
}
"""What begins and what ends each kind of span."""

_BEGINS = {begin: name for name, (begin, _) in KINDS.items()}
_ENDS = {end: name for name, (_, end) in KINDS.items()}

_PARENTS = {"agent": (), "check": ("agent",), "round": ("agent",), "worker": ("round", "agent")}
"""Below which span each is; any other one, and a record, is below the innermost of `_NESTED`."""

_NESTED = ("worker", "round", "agent")

UNFINISHED = "dlrover.unfinished"
"""The attribute of a span without an end in the log: its agent still runs, or was killed."""

_NO_ATTRIBUTES = frozenset({"time", "mono", "severity", "schema", "part", "since", "began"})


@dataclass
class Span:
    """What an agent did from `start` to `end`, in nanoseconds since 1970. `error` says how it failed, if it did."""

    name: str
    id: int
    parent: int | None
    start: int
    end: int
    attributes: Attributes
    error: str = ""


@dataclass(frozen=True)
class Record:
    """What happened at one moment, in the span with that id."""

    event: records.Event
    span: int
    at: int


def trace_id(logs: Iterable[AgentLog]) -> int:
    """The identifier of the trace of a job."""
    first = min((log.opened for log in logs), key=lambda opened: (opened.time, opened.node_id))
    return _identifier(16, first.job, first.node_id, first.time)


def build_trace(log: AgentLog) -> tuple[list[Span], list[Record]]:
    """The spans and records of an agent. Times are those of its monotonic clock after the first line, so a span is as
    long as it was also where a clock was adjusted meanwhile."""
    trace = _Trace(log)
    for event in log.events:
        trace.add(event)
    trace.close()
    return trace.spans, trace.found


@dataclass
class _Trace:
    """Adds the events of one agent. A span is open by its name and, below a worker, its local rank."""

    log: AgentLog
    spans: list[Span] = field(default_factory=list)
    found: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._open: dict[tuple[str, int], Span] = {}
        self._workers: dict[int, Span] = {}
        """The last one of each local rank. How it has failed is known only after its end."""
        self._last = self.log.opened.mono
        self._begin("agent", self.log.opened, self.log.opened.began)

    def add(self, event: records.Event) -> None:
        self._last = max(self._last, event.mono)
        name, place = _ENDS.get(type(event), ""), _place(event)
        if began := _BEGINS.get(type(event)):
            self._begin(began, event, getattr(event, "since", None))
        elif (name, place) in self._open:
            span = self._end(name, place)
            span.attributes |= attributes_of(event)
            if event.severity != records.INFO or (isinstance(event, records.AgentEnded) and event.exit_code):
                span.error = describe(event)
        else:
            worker = self._workers.get(place)
            if worker is not None and isinstance(event, records.WorkerFailed):
                worker.error = event.what
            span = worker or self._innermost(_NESTED, place) or self.spans[0]
            self.found.append(Record(event, span.id, self._time(event.mono)))

    def close(self) -> None:
        """End what the log does not end, with its last event."""
        for span in self._open.values():
            span.end, span.attributes[UNFINISHED] = self._time(self._last), True

    def _begin(self, name: str, event: records.Event, since: float | None) -> None:
        place = _place(event)
        if (name, place) in self._open:
            self._end(name, place)
        parent = self._innermost(_PARENTS.get(name, _NESTED), place)
        opened = self.log.opened
        identifier = _identifier(8, opened.node_id, opened.time, name, place, event.mono)
        start = self._time(event.mono if since is None else min(since, event.mono))
        span = Span(name, identifier, parent.id if parent else None, start, start, attributes_of(event))
        self.spans.append(span)
        self._open[name, place] = span
        if name == "worker":
            self._workers[place] = span

    def _end(self, name: str, place: int) -> Span:
        for inner in ("stall", "straggler") if name == "worker" else ():
            if (inner, place) in self._open:
                self._end(inner, place)
        span = self._open.pop((name, place))
        span.end = max(span.start, self._time(self._last))
        return span

    def _innermost(self, names: Sequence[str], place: int) -> Span | None:
        found = (self._open.get((name, place if name == "worker" else -1)) for name in names)
        return next((span for span in found if span is not None), None)

    def _time(self, mono: float) -> int:
        return _nanoseconds(self.log.opened.time) + round((mono - self.log.opened.mono) * 1e9)


def attributes_of(event: records.Event) -> Attributes:
    """The fields of an event as attributes; its reasons as a sentence and as codes."""
    fields = {name: getattr(event, name) for name in event.__struct_fields__ if name not in _NO_ATTRIBUTES}
    if reasons := fields.pop("reasons", ()):
        fields |= {"reason": render(reasons), "reasons": msgspec.json.encode(reasons).decode()}
    return {
        f"dlrover.{name}": value
        for name, value in fields.items()
        if isinstance(value, str | int | float) and value != ""
    }


def _place(event: records.Event) -> int:
    return event.local_rank if isinstance(event, records.WorkerEvent) else -1


def _identifier(size: int, *parts: object) -> int:
    """A number of `size` bytes that follows from the parts; never 0, which identifies nothing."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=size).digest(), "big") or 1


def _nanoseconds(time: datetime) -> int:
    return (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 1000
