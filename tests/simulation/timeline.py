"""Virtual time and its processes, each with a clock of its own; a process can be stopped, resumed and killed."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from random import Random
from typing import Any

GRAIN = 1e-6
"""Seconds by which every event is later than its scheduled time: clocks advance while code runs."""

MAX_EVENTS = 400_000
"""A limit above the number of events of any run: a loop that is always busy fails, instead of running forever."""


class Broken(BaseException):
    """An invariant does not hold. No code under test may catch this."""


def demand(condition: bool, invariant: str) -> None:
    """Raise Broken with the invariant unless the condition holds."""
    if not condition:
        raise Broken(invariant)


def demand_no_internal_error(message: str | None) -> None:
    """Raise Broken if a message of the product reports an internal error."""
    demand(message is None or "internal error" not in message, f"{message}")


class Killed(BaseException):
    """The running process is killed at this point. No code under test may catch this."""


@dataclass(slots=True)
class Event:
    """A scheduled event, which can be cancelled."""

    time: float
    run: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class Timeline:
    """All scheduled events in their order. `random` is the only source of randomness in a run."""

    def __init__(self, seed: int, log: Callable[[str], None] | None = None) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self._log = log
        self._events: list[tuple[float, int, Event]] = []
        self._order = itertools.count()
        self._count = 0
        self._broken: Broken | None = None

    def at(self, time: float, run: Callable[[], None]) -> Event:
        """Schedule a call at a time, or at once if that has passed."""
        event = Event((time if time > self.now else self.now) + GRAIN, run)
        # Tuples are compared without a call of Python, and no two have the same number.
        heapq.heappush(self._events, (event.time, next(self._order), event))
        return event

    def after(self, delay: float, run: Callable[[], None]) -> Event:
        return self.at(self.now + delay, run)

    def run_until(self, time: float, done: Callable[[], bool]) -> None:
        """Run all events until that time, or until `done`."""
        while self._events and self._events[0][0] <= time and not done():
            event = heapq.heappop(self._events)[2]
            self.now = event.time
            if not event.cancelled:
                self._count += 1
                if self._count > MAX_EVENTS:
                    raise Broken("the run never comes to rest: a process is always busy")
                event.run()
            if self._broken is not None:
                raise self._broken

    def break_off(self, broken: Broken) -> None:
        """End the run after this event: the invariant was broken in a task, which does not pass on its exceptions."""
        self._broken = self._broken or broken

    def note(self, who: str, what: str) -> None:
        if self._log is not None:
            self._log(f"{self.now:9.3f}  {who:<10} {what}")


Callback = Callable[..., Any]


def _call(callback: Callback, args: tuple[Any, ...], context: Context | None) -> Callable[[], None]:
    return (lambda: callback(*args)) if context is None else (lambda: context.run(callback, *args))


class Process:
    """A process with one event loop, which has the methods that the code under test uses.

    Its clock has another origin than all others. While the process is stopped its events wait; after it is resumed,
    events from outside are first, as in asyncio.
    """

    def __init__(self, timeline: Timeline, name: str) -> None:
        self.timeline = timeline
        self.name = name
        self.alive = True
        self.stopped = False
        self._began = timeline.now - timeline.random.uniform(0, 1e5)
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def time(self) -> float:
        return self.timeline.now - self._began

    def call_at(self, when: float, callback: Callback, *args: Any, context: Context | None = None) -> Event:
        return self._order(when + self._began, 1, _call(callback, args, context))

    def call_later(self, delay: float, callback: Callback, *args: Any, context: Context | None = None) -> Event:
        return self._order(self.timeline.now + delay, 1, _call(callback, args, context))

    def call_soon(self, callback: Callback, *args: Any, context: Context | None = None) -> Event:
        return self._order(self.timeline.now, 0, _call(callback, args, context))

    def run(self, callback: Callable[[], None]) -> None:
        """Run a callback for an event from outside."""
        self._run(0, callback)

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True
        self.note("is stopped")

    def resume(self) -> None:
        """SIGCONT."""
        if self.stopped:
            self.stopped = False
            self.note("goes on")
            waiting, self._waiting = sorted(self._waiting, key=lambda entry: entry[0]), []
            for kind, callback in waiting:
                self._run(kind, callback)

    def end(self) -> None:
        """End the process: its scheduled events do not run any more."""
        self.alive = False

    def died(self) -> None:
        self.end()

    def note(self, what: str) -> None:
        self.timeline.note(self.name, what)

    def _order(self, time: float, kind: int, callback: Callable[[], None]) -> Event:
        def happen() -> None:
            # An event that was cancelled while the process was stopped does not run either.
            self._run(kind, lambda: None if event.cancelled else callback())

        event = self.timeline.at(time, happen)
        return event

    def _run(self, kind: int, callback: Callable[[], None]) -> None:
        if not self.alive:
            return
        if self.stopped:
            self._waiting.append((kind, callback))
            return
        try:
            callback()
        except Killed:
            self.note("is killed")
            self.died()
