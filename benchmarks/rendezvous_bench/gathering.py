"""The driver's side of a job's crowds: start them, have them join, hear where they have got to."""

from __future__ import annotations

import contextlib
import selectors
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from comparison.lost import Late, Lost

from rendezvous_bench.crowd import Event, Order, What

READY_TIMEOUT = 120.0
"""Seconds for all crowds of a job to be ready to join; importing torch takes most of them. Then the trial is lost."""

END_TIMEOUT = 10.0
"""Seconds in which killed crowds must be gone; longer means that the kernel holds one, and the benchmark stops."""

MOST_CROWDS = 4
"""Processes that share all nodes but the last; more of them would only take the processors from each other."""


def crowd_sizes(nodes: int) -> list[int]:
    """How many nodes each crowd plays. The last crowd is one node: the one that joins apart, and dies."""
    others = nodes - 1
    crowds = min(MOST_CROWDS, others)
    return [*(others // crowds + (number < others % crowds) for number in range(crowds)), 1]


class Gathering:
    """The crowds of one job. Leaving it kills them."""

    def __init__(self, module: str, address: str, job: str, nodes: int, least: int, interval: float) -> None:
        self._crowds: list[subprocess.Popen[bytes]] = []
        self._events: list[list[Event]] = []
        self._selector = selectors.DefaultSelector()
        self._unread: list[bytes] = []
        self._module = module
        first = 0
        self._orders: list[Order] = []
        for count in crowd_sizes(nodes):
            self._orders.append(Order(address, job, first, count, nodes, least, interval))
            first += count

    def __enter__(self) -> Gathering:
        try:
            for number, order in enumerate(self._orders):
                crowd = subprocess.Popen(
                    [sys.executable, "-m", self._module, order.line()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    cwd=Path(__file__).resolve().parents[1],
                )
                self._crowds.append(crowd)
                self._events.append([])
                self._unread.append(b"")
                assert crowd.stdout is not None
                self._selector.register(crowd.stdout, selectors.EVENT_READ, number)
            self.wait("ready", READY_TIMEOUT, self.everyone)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    @property
    def everyone(self) -> range:
        """All crowds, by their numbers."""
        return range(len(self._orders))

    @property
    def others(self) -> range:
        """All but the node that joins apart."""
        return range(len(self._orders) - 1)

    @property
    def last(self) -> range:
        """The crowd that is one node, which joins apart from the others."""
        return range(len(self._orders) - 1, len(self._orders))

    def join(self, crowds: Iterable[int]) -> None:
        """Have all nodes of these crowds join at once."""
        for number in crowds:
            pipe = self._crowds[number].stdin
            assert pipe is not None
            pipe.write(b"join\n")
            pipe.flush()

    def first(self, what: What, timeout: float, crowds: Iterable[int], size: int = 0) -> int:
        """When the first of these crowds got there, in nanoseconds; as `wait`, which waits for all of them."""
        return min(event.at_ns for event in self._wait(what, timeout, list(crowds), size))

    def wait(self, what: What, timeout: float, crowds: Iterable[int], size: int = 0) -> int:
        """Wait until these crowds have got there; when the last of them did, in nanoseconds.

        Lost when one of them gives up or ends, Late after `timeout` seconds.
        """
        return max(event.at_ns for event in self._wait(what, timeout, list(crowds), size))

    def let_be(self, seconds: float) -> None:
        """Let the nodes be for that long; Lost when one of them gives up or ends meanwhile."""
        with contextlib.suppress(Late):
            self._wait("failed", seconds, [0], 0)

    def kill_last(self) -> int:
        """Kill the node that is a crowd of its own with SIGKILL; when, in nanoseconds, read just before."""
        victim = self._crowds[-1]
        assert victim.stdout is not None
        self._selector.unregister(victim.stdout)
        now = time.monotonic_ns()
        victim.kill()
        return now

    def _wait(self, what: What, timeout: float, crowds: list[int], size: int) -> list[Event]:
        deadline = time.monotonic() + timeout
        while True:
            found = [self._found(number, what, size) for number in crowds]
            here = [event for event in found if event is not None]
            if len(here) == len(crowds):
                return here
            left = deadline - time.monotonic()
            if left <= 0:
                raise Late(f"not all nodes were {what} within {timeout:g} s")
            for key, _ in self._selector.select(left):
                self._take(key.data)

    def _found(self, number: int, what: What, size: int) -> Event | None:
        return next((event for event in self._events[number] if (event.what, event.size) == (what, size)), None)

    def _take(self, number: int) -> None:
        stdout = self._crowds[number].stdout
        assert stdout is not None
        data = stdout.read1(65536)  # type: ignore[attr-defined]
        if not data:
            raise Lost("a crowd of nodes ended of itself")
        *lines, self._unread[number] = (self._unread[number] + data).split(b"\n")
        for line in lines:
            event = Event.parse(line.decode())
            if event.what == "failed":
                raise Lost(event.why)
            self._events[number].append(event)

    def _close(self) -> None:
        for crowd in self._crowds:
            crowd.kill()
        for crowd in self._crowds:
            crowd.wait(END_TIMEOUT)
            for pipe in (crowd.stdin, crowd.stdout):
                assert pipe is not None
                # What was not yet written to a crowd that is dead cannot be flushed.
                with contextlib.suppress(OSError):
                    pipe.close()
        self._selector.close()
