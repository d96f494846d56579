"""The status that waiting nodes receive: the same for all, and sent at a limited rate."""

from __future__ import annotations

import math

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.model import Waiting
from dlrover_run.coordination.policy_records import PolicyProgress
from dlrover_run.coordination.reasons import Reasons

INTERVAL = 1.0
"""The minimum number of seconds between two status messages to the nodes of a job."""

NODES_PER_SECOND = 500
"""Nodes to which the status is sent in a second on average, so that it never keeps a master from its work."""

SAME_MOMENT = 0.5
"""Seconds by which two deadlines may differ and count as one: a node counts down by itself."""


class WaitingThrottle:
    """Renews the status of waiting nodes. `outdated` is set when a report has been received since the last status."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._reasons: Reasons = ()
        self._policy: PolicyProgress | None = None
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
        waiting = self._coordinator.waiting(now)
        before, deadline = (self._reasons, self._policy), self._deadline
        self._reasons, self._policy = waiting.reasons, waiting.policy
        self._deadline = None if waiting.seconds is None else now + waiting.seconds
        return before != (self._reasons, self._policy) or _differ(deadline, self._deadline)

    def message(self, now: float) -> Waiting:
        return Waiting(self._reasons, None if self._deadline is None else max(0.0, self._deadline - now), self._policy)


def _differ(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is not other
    return abs(one - other) > SAME_MOMENT
