"""The protocol of a check process: requests on standard input, replies on what was standard output, one JSON a line.

    {"do": "compute", "seconds": 0.5}
    {"do": "link", "name": "1/1/0/0-1", "address": "10.0.0.1", "port": 1234, "host": true, "rank": 0, "world": 4,
     "timeout": 30.0}

The reply has `done`, the kind of the request, and for a link its `name`, and either

    "device": "NVIDIA H200", "tflops": 612.5        for compute,
    "gigabytes": 1.2                                for a link, with "shared": the device, if processes share one, or
    "problem": "clause"                             with, for compute, "wrong": whether a result was wrong.

`"ends": true` beside a problem: the process ends itself after this reply, because it cannot recover from the failure,
such as a collective that hangs on an accelerator. The node is not at fault; start another process.
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any, NamedTuple

MAX_REQUEST = 65_536
"""Maximum bytes of a request, which has some two hundred."""

MAX_PROBLEM = 300
"""Characters of a library's error message that are quoted in a clause."""

EXIT_STUCK = 3
"""The exit code of a process that has replied to a request and cannot recover from its failure."""


class InvalidRequest(ValueError):
    """A line that is not a request; the message is a clause."""


class Compute(NamedTuple):
    """Multiply matrices for `seconds`."""

    seconds: float


class Link(NamedTuple):
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


Request = Compute | Link


_KINDS: dict[str, type[Request]] = {"compute": Compute, "link": Link}


def read_request(line: bytes) -> Request:
    """The request of a line. Raises InvalidRequest. Only the agent can write one, so its values are not checked."""
    try:
        values = json.loads(line)
        return _KINDS[values.pop("do")](**values)
    except (ValueError, RecursionError):
        raise InvalidRequest("it is not JSON") from None
    except (AttributeError, KeyError, TypeError) as error:
        raise InvalidRequest(f"it is neither for compute nor for link ({error!r})") from None


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
