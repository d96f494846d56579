"""The rate at which waiting nodes receive what they wait for. All of them receive the same."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from dlrover_run.coordination.records.assignment import Waiting

INTERVAL = 1.0
"""The minimum number of seconds between two status messages to the nodes of a job."""


NODES_PER_SECOND = 500
"""Nodes to which the status is sent in a second on average, so that it never keeps a master from its work."""


SAME_MOMENT = 0.5
"""Seconds by which two deadlines may differ and count as one: a node counts down by itself."""


class WaitingThrottle:
    """Renews the status of waiting nodes, which `compute` returns for a time. `outdated` is set when something has
    arrived since the last status."""

    def __init__(self, compute: Callable[[float], Waiting]) -> None:
        self._compute = compute
        self._waiting = Waiting(())
        self._deadline: float | None = None
        self._next = -math.inf
        self.outdated = True

    @property
    def due(self) -> float | None:
        """When to renew the status; None when nothing has changed."""
        return self._next if self.outdated else None

    def renew(self, now: float, nodes: int, at_once: bool) -> bool:
        """Renew the status if that is due, or in any case `at_once`; return whether it has changed."""
        if not at_once and (not self.outdated or now < self._next):
            return False
        self.outdated = False
        self._next = now + max(INTERVAL, nodes / NODES_PER_SECOND)
        waiting = self._compute(now)
        before, deadline = self._waiting, self._deadline
        self._waiting = msgspec.structs.replace(waiting, seconds=None)
        self._deadline = None if waiting.seconds is None else now + waiting.seconds
        return before != self._waiting or _differ(deadline, self._deadline)

    def message(self, now: float) -> Waiting:
        left = None if self._deadline is None else max(0.0, self._deadline - now)
        return msgspec.structs.replace(self._waiting, seconds=left)


def _differ(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is not other
    return abs(one - other) > SAME_MOMENT
