"""Virtual time, and processes that live in it: each with a clock of its own, to be stopped, resumed and killed."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field
from random import Random
from typing import Any

GRAIN = 1e-6
"""Seconds by which every event is later than it was ordered for: no clock stands still while something happens."""

MOST_EVENTS = 400_000
"""More than any run has: a loop that is always busy is a failure, not a run that never ends."""


class Broken(BaseException):
    """Something that must always hold does not. No code under test may catch it."""


def demand(condition: bool, law: str) -> None:
    """Raise Broken with the law unless the condition holds."""
    if not condition:
        raise Broken(law)


def demand_no_internal_error(message: str | None) -> None:
    """Raise Broken with a message of the product that reports a defect of its own."""
    demand(message is None or "internal error" not in message, f"{message}")


class Killed(BaseException):
    """The process that runs ends here, in the middle of what it does. No code under test may catch it."""


@dataclass(order=True)
class Event:
    """Something that will happen, unless it is cancelled."""

    time: float
    order: int
    run: Callable[[], None] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.cancelled = True


class Timeline:
    """All that is going to happen, in its order. `random` is the only source of chance in a run."""

    def __init__(self, seed: int, log: Callable[[str], None] | None = None) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self._log = log
        self._events: list[Event] = []
        self._order = itertools.count()
        self._count = 0
        self._broken: Broken | None = None

    def at(self, time: float, run: Callable[[], None]) -> Event:
        """Have something happen at a time, or at once when that has passed."""
        event = Event(max(time, self.now) + GRAIN, next(self._order), run)
        heapq.heappush(self._events, event)
        return event

    def after(self, delay: float, run: Callable[[], None]) -> Event:
        return self.at(self.now + delay, run)

    def run_until(self, time: float, done: Callable[[], bool]) -> None:
        """Let everything happen until that time, or until it is done."""
        while self._events and self._events[0].time <= time and not done():
            event = heapq.heappop(self._events)
            self.now = event.time
            if not event.cancelled:
                self._count += 1
                if self._count > MOST_EVENTS:
                    raise Broken("the run never comes to rest: somebody is always busy")
                event.run()
            if self._broken is not None:
                raise self._broken

    def break_off(self, broken: Broken) -> None:
        """End the run after this event: what was broken is in a task, which keeps its exceptions to itself."""
        self._broken = self._broken or broken

    def note(self, who: str, what: str) -> None:
        if self._log is not None:
            self._log(f"{self.now:9.3f}  {who:<10} {what}")


Callback = Callable[..., Any]


def _call(callback: Callback, args: tuple[Any, ...], context: Context | None) -> Callable[[], None]:
    return (lambda: callback(*args)) if context is None else (lambda: context.run(callback, *args))


class Process:
    """A process with one event loop, of which it offers as much as the code under test uses.

    Its clock began at another moment than everybody else's. While it is stopped everything waits that should happen in
    it; once it goes on, what came from outside is first, as in asyncio.
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
        """Something comes from outside."""
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
        """Whatever it still had to do is not done any more."""
        self.alive = False

    def died(self) -> None:
        self.end()

    def note(self, what: str) -> None:
        self.timeline.note(self.name, what)

    def _order(self, time: float, kind: int, callback: Callable[[], None]) -> Event:
        def happen() -> None:
            # What was cancelled while it waited for the process to go on does not happen either.
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
