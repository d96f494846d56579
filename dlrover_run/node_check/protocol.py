"""The protocol of a check process: requests on standard input, replies on what was standard output, one JSON a line.

    {"do": "compute", "seconds": 0.5}
    {"do": "link", "name": "1/1/0/0-1", "address": "10.0.0.1", "port": 1234, "host": true, "rank": 0, "world": 4,
     "timeout": 30.0}

The reply has `done`, the kind of the request, and for a link its `name`, and either

    "device": "NVIDIA H200", "tflops": 612.5        for compute,
    "gigabytes": 1.2                                for a link, or
    "problem": "clause"                             with, for compute, "wrong": whether a result was wrong.

`"ends": true` beside a problem: the process ends itself after this reply, because it cannot recover from the failure,
such as a collective that hangs on an accelerator. The node is not at fault; start another process.
"""

from __future__ import annotations

import json
import math
import os
import threading
from dataclasses import dataclass, fields
from typing import Any

MAX_REQUEST = 65_536
"""Maximum bytes of a request, which has some two hundred."""

MAX_PROBLEM = 300
"""Characters of a library's error message that are quoted in a clause."""

EXIT_STUCK = 3
"""The exit code of a process that has replied to a request and cannot recover from its failure."""


class InvalidRequest(ValueError):
    """A line that is not a request; the message is a clause."""


@dataclass(frozen=True)
class Compute:
    """Multiply matrices for `seconds`."""

    seconds: float

    def problem(self) -> str | None:
        """A clause on a value that is out of range, or None."""
        return None if 0 < self.seconds < math.inf else "`seconds` is not a time"


@dataclass(frozen=True)
class Link:
    """Gather data with the other processes of the link `name`, as `rank` of `world`.

    They connect to the store at `address` and `port`, which this process hosts if `host` is true. All of it may take
    `timeout` seconds.
    """

    name: str
    address: str
    port: int
    host: bool
    rank: int
    world: int
    timeout: float

    def problem(self) -> str | None:
        """A clause on a value that is out of range, or None."""
        if not 0 < self.timeout < math.inf:
            return "`timeout` is not a time"
        if not 0 < self.port < 65_536:
            return f"there is no port {self.port}"
        if self.world < 2 or not 0 <= self.rank < self.world:
            return f"a link has no rank {self.rank} of {self.world}"
        return None


Request = Compute | Link


_KINDS: dict[str, type[Request]] = {"compute": Compute, "link": Link}


def read_request(line: bytes) -> Request:
    """The request of a line. Raises InvalidRequest."""
    try:
        values: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidRequest("it is not JSON") from None
    if not isinstance(values, dict):
        raise InvalidRequest("it is not an object")
    what = values.pop("do", None)
    kind = _KINDS.get(what) if isinstance(what, str) else None
    if kind is None:
        raise InvalidRequest("`do` is neither compute nor link")
    # The types are names, because annotations are not evaluated here.
    types = {field.name: str(field.type) for field in fields(kind)}
    if values.keys() != types.keys():
        raise InvalidRequest(f"{what} takes {', '.join(types)} and nothing else")
    for name, wanted in types.items():
        if wanted == "float" and type(values[name]) is int:
            continue  # JSON has one type of numbers.
        if type(values[name]).__name__ != wanted:
            raise InvalidRequest(f"`{name}` is not of type {wanted}")
    request = kind(**values)
    if (problem := request.problem()) is not None:
        raise InvalidRequest(problem)
    return request


def failed(request: Request, problem: str, wrong: bool = False) -> dict[str, Any]:
    if isinstance(request, Compute):
        return {"done": "compute", "problem": problem, "wrong": wrong}
    return {"done": "link", "name": request.name, "problem": problem}


def first_line(error: BaseException) -> str:
    """The first line of an exception's message that is not empty, or the exception's name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:MAX_PROBLEM]


class Replies:
    """Writes replies. A request gets one reply, from the first thread that sends one."""

    def __init__(self) -> None:
        # Descriptor 1 becomes a copy of 2, so that the output of libraries is not mixed with replies.
        self._fd = os.dup(1)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._expected = False

    def expect(self) -> None:
        self._expected = True

    def send(self, reply: dict[str, Any]) -> None:
        """Reply to the request, unless that has been done."""
        with self._lock:
            if not self._expected:
                return
            self._expected = False
            line = memoryview(json.dumps(reply).encode() + b"\n")
            while line:
                line = line[os.write(self._fd, line) :]

    def send_last(self, reply: dict[str, Any]) -> None:
        """Reply to the request and end the process, in any thread."""
        self.send({**reply, "ends": True})
        os._exit(EXIT_STUCK)
