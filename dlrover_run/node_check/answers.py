"""Answers to orders: one JSON object on a line each, on what was standard output when the process started.

Descriptor 1 becomes a copy of 2 at once, so that whatever libraries print is kept apart from them.
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any

from .orders import Compute, Order

EXIT_STUCK = 3
"""The exit code of a process that has answered an order which it could not end."""

MOST_WORDS = 300
"""Characters of a library's own words that are worth a place in a clause."""


class Answers:
    """Where answers go. One order is answered once, whichever thread is first."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._open = False

    @classmethod
    def take_stdout(cls) -> Answers:
        """Answer on what is standard output now, and let nothing else reach it."""
        fd = os.dup(1)
        os.dup2(2, 1)
        return cls(fd)

    def expect(self) -> None:
        """An order has come."""
        self._open = True

    def give(self, answer: dict[str, Any]) -> None:
        """Answer the order, unless that has been done."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            line = memoryview(json.dumps(answer).encode() + b"\n")
            while line:
                line = line[os.write(self._fd, line) :]

    def give_last(self, answer: dict[str, Any]) -> None:
        """Answer the order and end the process, from whichever thread."""
        self.give({**answer, "ends": True})
        os._exit(EXIT_STUCK)


def failed(order: Order, problem: str, wrong: bool = False) -> dict[str, Any]:
    """The answer that tells why an order could not be done."""
    if isinstance(order, Compute):
        return {"done": "compute", "problem": problem, "wrong": wrong}
    return {"done": "link", "name": order.name, "problem": problem}


def first_line(error: BaseException) -> str:
    """What an exception says, as a clause: the first line of it that says something, or its name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:MOST_WORDS]
