"""A crowd: one process that plays many nodes, and what it and the driver say to each other.

The driver gives an `Order` as the crowd's one argument and writes a line to its standard input when the nodes shall
join. The crowd writes an `Event` to its standard output, a line of JSON, whenever all of its nodes have got somewhere.
The end of its standard input ends it, so that a crowd never outlives its driver.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

What = Literal["ready", "joining", "heard", "seated", "failed"]


@dataclass(frozen=True)
class Order:
    """The nodes that a crowd plays: `count` of the `nodes` of a job, from number `first` on. They meet at `address`,
    the job trains with `least` of them if it must, and between two signs of life are `interval` seconds."""

    address: str
    job: str
    first: int
    count: int
    nodes: int
    least: int
    interval: float

    def line(self) -> str:
        """The order as an argument of a command."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def parse(line: str) -> Order:
        """The order that `line` made."""
        return Order(**json.loads(line))


@dataclass(frozen=True)
class Event:
    """Where all nodes of a crowd have got to. `at_ns` is CLOCK_MONOTONIC, the same in all processes of the machine.

    "heard": the rendezvous knows them. "seated": each has its place in a world of `size` nodes. "failed": one of them
    gave up, and `why`.
    """

    what: What
    at_ns: int
    size: int = 0
    why: str = ""

    def line(self) -> str:
        """The event as the crowd writes it."""
        return json.dumps(dataclasses.asdict(self)) + "\n"

    @staticmethod
    def parse(line: str) -> Event:
        """The event that `line` made."""
        return Event(**json.loads(line))


class Tally:
    """Counts the nodes of a crowd at each place they get to, and tells of it when the last one is there.

    Safe for a thread a node. A node is counted as often as it says so: it has to say each thing once.
    """

    def __init__(self, count: int, tell: Callable[[Event], None], clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._count = count
        self._tell = tell
        self._clock = clock
        self._reached: Counter[tuple[What, int]] = Counter()
        self._lock = threading.Lock()

    def reach(self, what: What, size: int = 0) -> None:
        """One more node has got there."""
        now = self._clock()
        with self._lock:
            self._reached[what, size] += 1
            if self._reached[what, size] == self._count:
                self._tell(Event(what, now, size))

    def fail(self, why: str) -> None:
        """A node has given up."""
        with self._lock:
            self._tell(Event("failed", self._clock(), why=why[:500]))


def say(event: Event) -> None:
    """Tell the driver. A line is shorter than PIPE_BUF, so it is written whole."""
    os.write(sys.stdout.fileno(), event.line().encode())


Join = Callable[[], None]
"""Starts the nodes, and returns at once or goes on for as long as the process lives."""


def play(prepare: Callable[[Order, Tally], Join]) -> None:
    """Be a crowd: prepare the nodes, say when ready, have them join when told to, and end with the driver."""
    order = Order.parse(sys.argv[1])
    # A connection a node, and the usual limit is 1024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    join = prepare(order, Tally(order.count, say))
    say(Event("ready", time.monotonic_ns()))
    if not sys.stdin.readline():
        return
    threading.Thread(target=_end_with_driver, daemon=True).start()
    say(Event("joining", time.monotonic_ns()))
    join()


def _end_with_driver() -> None:
    sys.stdin.read()
    os._exit(0)
