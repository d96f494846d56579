"""Streams between nodes and masters, over a network that delays, holds back, repeats, cuts and loses."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from simulation.timeline import Event, Process, Timeline

REPEATABLE = (b'{"type":"assigned"', b'{"type":"report"')
"""How the messages begin that may arrive more than once: each is all that its sender has to say, so the same one again
must change nothing.

What opens and ends a stream is sent once, by the product's streams as by these.
"""


def is_repeatable(message: Any) -> bool:
    return isinstance(message, bytes) and message.startswith(REPEATABLE)


class Weather:
    """`slowness` is how many seconds every fifth message may take, in all the network. `echo` is how probably a message
    arrives once more, and after that once more again. `lag` is how many seconds later than it could etcd may tell a
    watch of a change.

    A stream keeps its order, so a repetition may be late but comes before whatever was said next.
    """

    def __init__(self, slowness: float, echo: float, lag: float = 0.0) -> None:
        self.slowness = slowness
        self.echo = echo
        self.lag = lag


class Waits(Protocol):
    """What stands before a way that is held up."""

    def pump(self) -> None: ...


class Link:
    """The way between one node and the masters, or etcd. Each direction can be held up on its own.

    What is sent meanwhile waits, as TCP does it, and comes in order once the way is free.
    """

    def __init__(self) -> None:
        self._holds = [0, 0]
        self._waiting: tuple[list[Waits], list[Waits]] = ([], [])

    def free(self, direction: int) -> bool:
        return not self._holds[direction]

    def hold(self, direction: int) -> None:
        self._holds[direction] += 1

    def release(self, direction: int) -> None:
        self._holds[direction] -= 1
        self._resume(direction)

    def heal(self) -> None:
        for direction in (0, 1):
            self._holds[direction] = 0
            self._resume(direction)

    def wait(self, direction: int, waits: Waits) -> None:
        """Have this pumped when the way is free again."""
        self._waiting[direction].append(waits)

    def _resume(self, direction: int) -> None:
        if self.free(direction):
            waiting = list(self._waiting[direction])
            self._waiting[direction].clear()
            for waits in waiting:
                waits.pump()


class Pipe:
    """One direction of one stream: what is sent arrives in order, or not at all."""

    def __init__(self, timeline: Timeline, link: Link, direction: int, weather: Weather) -> None:
        self._timeline = timeline
        self._link = link
        self._direction = direction
        self._weather = weather
        self._queue: deque[tuple[float, Any]] = deque()
        self._timer: Event | None = None
        self._held = False
        self.receive: Callable[[Any], None] = lambda message: None

    def send(self, message: Any) -> None:
        self._put(message)
        while is_repeatable(message) and self._timeline.random.random() < self._weather.echo:
            self._put(message)
        self.pump()

    def _put(self, message: Any) -> None:
        random = self._timeline.random
        delay = random.uniform(0.0002, 0.005) if random.random() < 0.8 else random.uniform(0, self._weather.slowness)
        due = max(self._timeline.now + delay, self._queue[-1][0] if self._queue else 0.0)
        self._queue.append((due, message))

    def lose(self) -> None:
        """Forget what is on its way, or the last part of it."""
        kept = self._timeline.random.randint(0, len(self._queue))
        while len(self._queue) > kept:
            self._queue.pop()

    def shut(self) -> None:
        self._queue.clear()
        self.receive = lambda message: None

    def pump(self) -> None:
        """Let everything arrive that is due."""
        while self._queue:
            if not self._link.free(self._direction):
                self._link.wait(self._direction, self)
                return
            due, message = self._queue[0]
            if due > self._timeline.now:
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = self._timeline.at(due, self.pump)
                return
            self._queue.popleft()
            self.receive(message)


TO_MASTER, TO_NODE = 0, 1


class End:
    """What the other side hears when a stream has ended."""


END = End()


class Stream:
    """A stream with two ends. Who closes his end hears no more, and the other one learns of it, if the way is free."""

    def __init__(self, timeline: Timeline, link: Link, weather: Weather) -> None:
        self._timeline = timeline
        self._pipes = (Pipe(timeline, link, TO_MASTER, weather), Pipe(timeline, link, TO_NODE, weather))
        self._closed = [False, False]

    def listen(self, direction: int, process: Process, receive: Callable[[Any], None]) -> None:
        """Have what comes in that direction received in a process."""
        self._pipes[direction].receive = lambda message: process.run(lambda: receive(message))

    def send(self, direction: int, message: Any) -> None:
        """Send something; whether it arrives is another question."""
        if not self._closed[direction]:
            self._pipes[direction].send(message)

    def finish(self, direction: int) -> None:
        """Whoever sends in that direction sends nothing more, and goes on to listen."""
        if not self._closed[direction]:
            self._closed[direction] = True
            self._pipes[direction].send(END)

    def close(self, direction: int, silent: bool = False, reset: bool = False) -> None:
        """Whoever sends in that direction is gone. `silent` tells nobody; `reset` loses what was on its way."""
        self._pipes[1 - direction].shut()
        if self._closed[direction]:
            return
        self._closed[direction] = True
        if reset:
            self._pipes[direction].lose()
        if not silent:
            self._pipes[direction].send(END)

    def cut(self) -> None:
        for direction in (TO_MASTER, TO_NODE):
            if not self._closed[direction]:
                self._pipes[direction].lose()
                self._pipes[direction].send(END)
