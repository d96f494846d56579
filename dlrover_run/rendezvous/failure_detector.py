"""Heartbeat timeouts, corrected for pauses of this process.

A process that was stopped, or whose machine is overloaded, finds its own timers late. Time in which it could not
receive anything must not count against its peers (memberlist has the same aim with its local
health awareness, by longer timeouts).

Pure: times are passed in, in seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from dlrover_run.background import LONG_PAUSE

PAUSE_CHECK_INTERVAL = 0.25
"""Seconds between two checks for pauses by a coordinator's process.

A pause is measured as up to this much shorter than it was, so this is a fraction of the default `lost_after`.
"""

PAUSE_TOLERANCE = 0.02
"""Seconds by which a check may be late without counting as a pause: a busy moment of the event loop."""

DEADLINE_MARGIN = 0.001
"""Seconds after a timeout at which to check it, so that rounding never makes a check too early and the next one due at
once."""

Peer = TypeVar("Peer", bound=Hashable)


class PauseDetector:
    """Measures how long this process was stopped or starved. The owner must call `paused_for` at `next_check` or
    earlier; a late call shows a pause."""

    def __init__(self, now: float, interval: float = PAUSE_CHECK_INTERVAL) -> None:
        self._interval = interval
        self.next_check = now + interval

    def paused_for(self, now: float) -> float:
        """Seconds of pause since the last call; 0 if the call is in time.

        Call this before anything is concluded from the time that has passed.
        """
        late = now - self.next_check
        if late < 0:
            return 0.0
        self.next_check = now + self._interval
        return late if late > PAUSE_TOLERANCE else 0.0


class FailureDetector(Generic[Peer]):
    """Declares a peer failed if no heartbeat has come for `timeout` seconds, pauses of this process excluded."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._stalled = 0.0
        # Ordered by time, because a heartbeat moves its peer to the end. The clock stands still during pauses.
        self._heartbeats: dict[Peer, float] = {}

    def heartbeat(self, peer: Peer, now: float) -> None:
        """Count the timeout of a peer anew, or watch a new one. Called with each message of the peer, of any kind."""
        self._heartbeats.pop(peer, None)
        self._heartbeats[peer] = now - self._stalled

    def remove(self, peer: Peer) -> None:
        """Watch a peer no longer. Called when its connection has ended."""
        self._heartbeats.pop(peer, None)

    def compensate_stall(self, seconds: float) -> None:
        """Give every peer that much more time."""
        self._stalled += seconds

    def failed_peers(self, now: float, due: float | None = None) -> list[Peer]:
        """The peers that have exceeded the timeout, the longest silent one first.

        `due` is when this check was due. If it is late by more than LONG_PAUSE, messages that arrived meanwhile may
        still be unread, so every peer gets a whole timeout again.
        """
        if due is not None and now - due > LONG_PAUSE:
            for peer in list(self._heartbeats):
                self.heartbeat(peer, now)
        found = []
        for peer, heartbeat in self._heartbeats.items():
            if now - self._stalled - heartbeat <= self._timeout:
                break
            found.append(peer)
        return found

    def next_deadline(self) -> float | None:
        """When the next peer exceeds the timeout unless it sends something; None without peers."""
        first = next(iter(self._heartbeats.values()), None)
        return None if first is None else first + self._stalled + self._timeout + DEADLINE_MARGIN
