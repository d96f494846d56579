"""Streams between nodes and masters, over a network that delays, blocks, repeats, cuts and loses."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from simulation.timeline import Event, Process, Timeline

REPEATABLE = (b'{"type":"assigned"', b'{"type":"report"')
"""The prefixes of messages that may arrive more than once: each has the complete state of its sender, so a repetition
must change nothing.

The first and the last message of a stream are sent once, by the streams of the product and by these.
"""


def is_repeatable(message: Any) -> bool:
    return isinstance(message, bytes) and message.startswith(REPEATABLE)


class Weather:
    """`slowness` is the maximum delay of every fifth message of the network in seconds. `echo` is the probability that
    a message arrives once more, and then once more again. `lag` is the maximum additional delay in seconds with
    which etcd notifies a watch of a change.

    A stream keeps its order, so a repetition may be late but arrives before the next message.
    """

    def __init__(self, slowness: float, echo: float, lag: float = 0.0) -> None:
        self.slowness = slowness
        self.echo = echo
        self.lag = lag


class Waits(Protocol):
    """A message or a connection that waits at a blocked link."""

    def pump(self) -> None: ...


class Link:
    """The link between one node and the masters, or etcd. Each direction can be blocked separately.

    As with TCP, messages that are sent to a blocked link wait, and arrive in order once it is unblocked.
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
        """Pump this when the direction is unblocked."""
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
        """Lose the messages in transit, or the last part of them."""
        kept = self._timeline.random.randint(0, len(self._queue))
        while len(self._queue) > kept:
            self._queue.pop()

    def shut(self) -> None:
        self._queue.clear()
        self.receive = lambda message: None

    def pump(self) -> None:
        """Deliver all messages that are due."""
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
    """What the other end receives when a stream has ended."""


END = End()


class Stream:
    """A stream with two ends. An end that is closed receives nothing more, and the other end is notified of it unless
    the link is blocked."""

    def __init__(self, timeline: Timeline, link: Link, weather: Weather) -> None:
        self._timeline = timeline
        self._pipes = (Pipe(timeline, link, TO_MASTER, weather), Pipe(timeline, link, TO_NODE, weather))
        self._closed = [False, False]

    def listen(self, direction: int, process: Process, receive: Callable[[Any], None]) -> None:
        """Deliver the messages of that direction to a process."""
        self._pipes[direction].receive = lambda message: process.run(lambda: receive(message))

    def send(self, direction: int, message: Any) -> None:
        """Send a message, which may be lost."""
        if not self._closed[direction]:
            self._pipes[direction].send(message)

    def finish(self, direction: int) -> None:
        """Half-close: the sender of that direction sends nothing more, and can still receive."""
        if not self._closed[direction]:
            self._closed[direction] = True
            self._pipes[direction].send(END)

    def close(self, direction: int, silent: bool = False, reset: bool = False) -> None:
        """Close the end that sends in that direction. If `silent`, the other end is not notified; `reset` loses the
        messages in transit."""
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
