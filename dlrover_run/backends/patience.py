"""How a node spaces its attempts to reach the place of its job's records, a master or etcd, how long it goes on, and
when silence means that a master is gone.

Pure: whoever owns these tells them what happened and at which time of one monotonic clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable

from dlrover_run.coordination.records import NodePhase

RETRY_FIRST = 0.2
"""Seconds that a pause between the first attempt to reach the place and the second one can last at most."""

RETRY_MOST = 3.0
"""Seconds that no pause between two attempts is longer than. A coordinator's RETURN_GRACE is twice that."""

ID_IN_USE_PATIENCE = 30.0
"""Seconds for which a refusal that may pass is met with another attempt; then the node gives up with its reason.

A node id is refused while another process with that id is alive, which may be this node's dying predecessor.
"""

LATENESS = 0.5
"""Seconds by which a timer is late on a busy machine at times. By more, and this process was stopped or starved."""

_IDLE = frozenset({NodePhase.WAITING, NodePhase.SUCCEEDED, NodePhase.FAILED})


class Search:
    """One node's search for that place: when to try again, and whether there is any use in that.

    It goes on for ever while workers run. A node without any gives up when the place has stayed away for `join_timeout`
    seconds, or has refused it for `refusal_patience` seconds. `chance` returns a random number from 0 to 1.
    """

    def __init__(
        self,
        join_timeout: float,
        now: float,
        chance: Callable[[], float],
        refusal_patience: float = ID_IN_USE_PATIENCE,
    ) -> None:
        self.join_timeout = join_timeout
        self.refusal_patience = refusal_patience
        self._chance = chance
        self._failures = 0
        self._connected_at = now
        self._away_since: float | None = now
        self._idle_since: float | None = now
        self._refused_since: float | None = None

    def see(self, phase: NodePhase, now: float) -> None:
        """What the node is doing now."""
        if phase not in _IDLE:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now

    def connected(self, now: float) -> None:
        """The node has been taken in."""
        self._connected_at = now
        self._away_since = None
        self._refused_since = None

    def lost(self, now: float) -> None:
        """The connection has ended."""
        self._away_since = now
        self._refused_since = None
        # Else a master that ends every stream at once would be called without a pause.
        self._failures = 0 if now - self._connected_at >= RETRY_MOST else self._failures + 1

    def failed(self) -> None:
        """An attempt has failed because nobody answered."""
        self._failures += 1
        self._refused_since = None

    def refused(self, now: float) -> bool:
        """The node is refused, which may pass; whether it has been for too long."""
        self._failures += 1
        if self._away_since is None:
            self._away_since = now
        if self._refused_since is None:
            self._refused_since = now
        return now - self._refused_since >= self.refusal_patience

    def invited(self) -> None:
        """What the refusal was about has gone, so the next attempt need not wait."""
        self._failures = 0

    def pause(self) -> float:
        """Seconds until the next attempt, other ones each time, so that a thousand nodes do not call at once.

        With n failures so far: none for n = 0, else anything from 0 to the least of RETRY_MOST and RETRY_FIRST * 2**n.
        """
        if not self._failures:
            return 0.0
        return self._chance() * min(RETRY_MOST, RETRY_FIRST * 2.0 ** min(self._failures, 16))

    def left(self, now: float) -> float | None:
        """Seconds after which the node gives up; None while it is taken in or has workers that run."""
        if self._away_since is None or self._idle_since is None:
            return None
        return max(0.0, max(self._away_since, self._idle_since) + self.join_timeout - now)


class Silence:
    """How long a master has not been heard, less the time in which this process itself could not have heard it.

    Whoever owns this looks at the times that he sets himself; how late a look is shows how long we were not running.
    """

    def __init__(self, limit: float, now: float) -> None:
        self._limit = limit
        self.deadline = now + limit

    def hear(self, now: float) -> None:
        """The master has said something."""
        self.deadline = max(self.deadline, now + self._limit)

    def too_long(self, due: float, now: float) -> bool:
        """Whether the master has been silent for too long, at a look that was due at `due`."""
        late = now - due
        if late > LATENESS:
            # What the master said meanwhile is still to be read, so it has a whole limit once more.
            self.deadline = max(self.deadline + late, now + self._limit)
        return now >= self.deadline
