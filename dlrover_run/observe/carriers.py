"""Which connections carry training, and which only show that their ends live. Pure.

A library may send a few bytes at an even interval, whatever training does: the RAS threads of NCCL exchange some
hundred bytes a second between the processes of a job, from the start to the end, also while a worker of it is stopped.
So a connection counts by what it exchanges between two samples: a large exchange is training, or a download; a small
one is doubtful, and what the main thread of the worker does meanwhile decides (`features.hangs.search.changes`).

A connection that has exchanged nothing else for some time, at an even interval, is known as a keep-alive. Then a
larger exchange does not count either, unless it is very large: RAS sends its reports on the same connections, when it
is asked.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dlrover_run.observe.sock_diag import SocketCounters

SMALL_BYTES = 1024
"""Bytes in a second on one connection, both ways, that a heartbeat may have."""

BEATS = 5
"""Times at which a connection has sent, one after the other at an even interval, before it is known as a keep-alive."""

UNEVEN = 2.5
"""The longest interval is at most this many times the shortest one: a sample may miss a heartbeat."""

SLOW = 0.25
"""Seconds since the last heartbeat that some sample must show. Otherwise data is sent several times between two
samples, whose interval would look even."""

LARGE_BYTES = 1 << 20
"""Bytes of large exchanges with which a connection is no keep-alive, whatever else it does."""


@dataclass
class _Connection:
    """What is known of one connection: its bytes at the last sample, those of large exchanges, those of them that are
    no reports on a keep-alive (`carried`), and those of all exchanges but heartbeats (`counted`); the times of its last
    heartbeats, each with its age when it was seen."""

    total: int
    acked: int
    at: float
    large: int = 0
    carried: int = 0
    counted: int = 0
    is_keepalive: bool = False
    beats: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=BEATS))

    def take(self, one: SocketCounters, at: float) -> None:
        total, seconds = one.acked + one.received, max(1.0, at - self.at)
        exchanged, sent = total - self.total, one.acked > self.acked
        self.total, self.acked, self.at = total, one.acked, at
        is_large = exchanged > SMALL_BYTES * seconds
        self.large += exchanged if is_large else 0
        if self.is_keepalive and self.large <= LARGE_BYTES:
            return
        self.is_keepalive = False
        self.counted += exchanged
        if is_large:
            self.carried += exchanged
            self.beats.clear()
        elif sent:
            self._beat(at - one.sent_age, one.sent_age)

    def _beat(self, at: float, age: float) -> None:
        if self.beats and at - self.beats[-1][0] <= SLOW:
            return
        self.beats.append((at, age))
        gaps = [after[0] - before[0] for before, after in itertools.pairwise(self.beats)]
        is_even = len(self.beats) == BEATS and max(gaps) <= UNEVEN * min(gaps)
        self.is_keepalive = self.large <= LARGE_BYTES and is_even and max(age for _, age in self.beats) >= SLOW


class Carriers:
    """The connections of all workers of a node."""

    def __init__(self) -> None:
        self._connections: dict[int, _Connection] = {}

    def take(self, sockets: Sequence[SocketCounters], at: float) -> None:
        """Take the counters of all connections that there are at this time."""
        for inode in self._connections.keys() - {one.inode for one in sockets}:
            del self._connections[inode]
        for one in sockets:
            known = self._connections.get(one.inode)
            if known is not None:
                known.take(one, at)
                continue
            total = one.acked + one.received
            large = total if total > SMALL_BYTES else 0
            self._connections[one.inode] = _Connection(total, one.acked, at, large, large, total)

    def carried(self, one: SocketCounters) -> int:
        """The bytes of large exchanges on this connection."""
        known = self._connections.get(one.inode)
        return 0 if known is None else known.carried

    def counted(self, one: SocketCounters) -> int:
        """The bytes of all exchanges on this connection, without those of a known keep-alive."""
        known = self._connections.get(one.inode)
        return 0 if known is None else known.counted

    def is_keepalive(self, one: SocketCounters) -> bool:
        """Whether this connection has exchanged nothing but heartbeats for some time."""
        known = self._connections.get(one.inode)
        return known is not None and known.is_keepalive
