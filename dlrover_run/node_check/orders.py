"""The orders that a check process takes, one JSON object a line.

    {"do": "compute", "seconds": 0.5}
    {"do": "link", "name": "1/1/0/0-1", "address": "10.0.0.1", "port": 1234, "host": true, "rank": 0, "world": 4,
     "timeout": 30.0}

Each is answered by one JSON object on a line, with `done` what was done and for a link its `name`, and either

    "device": "NVIDIA H200", "tflops": 612.5        for compute,
    "gigabytes": 1.2                                for a link, or
    "problem": "clause"                             with, for compute, "wrong": whether a result was wrong.

`"ends": true` beside a problem says that the process ends itself after this answer, because what failed cannot be
undone within it, such as a collective that hangs on an accelerator. It is no fault of the process; start another.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

LONGEST = 65_536
"""Bytes of an order, which has some two hundred: more is no order."""


class OrderError(ValueError):
    """A line that is no order; the message is a clause."""


@dataclass(frozen=True)
class Compute:
    """Multiply matrices for `seconds`."""

    seconds: float

    def problem(self) -> str | None:
        """A clause when nobody can do that, else None."""
        return None if 0 < self.seconds < math.inf else "`seconds` is not a time"


@dataclass(frozen=True)
class Link:
    """Gather data with the others of the link `name`, as `rank` of `world`.

    They meet at the store at `address` and `port`, which this process hosts if `host` says so. All of it may take
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
        """A clause when nobody can do that, else None."""
        if not 0 < self.timeout < math.inf:
            return "`timeout` is not a time"
        if not 0 < self.port < 65_536:
            return f"there is no port {self.port}"
        if self.world < 2 or not 0 <= self.rank < self.world:
            return f"a link has no rank {self.rank} of {self.world}"
        return None


Order = Compute | Link

_KINDS: dict[str, tuple[type[Order], dict[str, type]]] = {
    "compute": (Compute, {"seconds": float}),
    "link": (
        Link,
        {"name": str, "address": str, "port": int, "host": bool, "rank": int, "world": int, "timeout": float},
    ),
}


def read_order(line: bytes) -> Order:
    """The order in a line. Raises OrderError."""
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise OrderError("it is not JSON") from None
    if not isinstance(fields, dict):
        raise OrderError("it is not an object")
    what = fields.pop("do", None)
    if not isinstance(what, str) or what not in _KINDS:
        raise OrderError("`do` is neither compute nor link")
    kind, types = _KINDS[what]
    if set(fields) != set(types):
        raise OrderError(f"{what} takes {', '.join(types)} and nothing else")
    for name, wanted in types.items():
        if wanted is float and type(fields[name]) is int:
            fields[name] = float(fields[name])
        if type(fields[name]) is not wanted:
            raise OrderError(f"`{name}` is no {wanted.__name__}")
    order = kind(**fields)
    problem = order.problem()
    if problem is not None:
        raise OrderError(problem)
    return order
