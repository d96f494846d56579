"""Detects whether the workers of a round have begun to train: connected to their store, or written a checkpoint.

A job that repeatedly fails before that cannot start at all, and stops early; a job that has trained keeps all its
restarts. A wrong yes costs some restarts, a wrong no ends a healthy job, so the answer is yes in doubt.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from dlrover_run.background import TimeLimit
from dlrover_run.coordination.records.round import RankAssignment
from dlrover_run.processes.ports import until_listens
from dlrover_run.workers.checkpoint_marks import CheckpointMarks

STARTUP_SECONDS = 60.0
"""Seconds after which a round counts as having trained in any case.

A script that cannot start fails sooner, and the kernel lists an ended connection for no longer.
"""

STORE_TIMEOUT = 0.1
"""Seconds for which forked workers of other nodes are held back until the one with rank 0 hosts the store."""

LONG_STORE_TIMEOUT = 0.5
"""The same after a round in which it did in time: then the script does nothing before that takes long, and the store is
only late because an old worker takes its time to end."""

STORE_INTERVAL = 0.005
"""Seconds between two attempts to connect to it."""

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))

_NO_CONNECTION = frozenset({"02", "03", "0A"})
"""Being opened, being accepted, and listening."""

_MAPPED = "0000000000000000FFFF0000"
"""How the kernel writes the beginning of an IPv6 address that stands for an IPv4 one."""


class StartupProbe:
    """Observes on this node whether the workers of one round, which starts now, begin to train."""

    def __init__(self, ranks: RankAssignment) -> None:
        self.marks = CheckpointMarks()
        self._ranks = ranks
        self._began = time.monotonic()
        self._has_trained = False

    async def until_store_listens(self, timeout: float) -> float:
        """Wait until the store of the round accepts connections, if another node hosts it, for `timeout` seconds at
        most. Returns the timeout for the next round.

        A forked worker connects within milliseconds, and torch's client waits for 0.3 to 0.7 s after an attempt that
        was refused. The node of a worker that has failed begins the next round before the others. In the first round
        each node begins when its template has imported, which differs by more than this wait.
        """
        ranks = self._ranks
        if ranks.node_rank == 0 or ranks.round == 1:
            return timeout
        try:
            version = ipaddress.ip_address(ranks.store_address).version
        except ValueError:
            return timeout  # A name would have to be resolved, which may take longer.
        family = socket.AF_INET if version == 4 else socket.AF_INET6
        with contextlib.suppress(TimeoutError):
            async with TimeLimit(timeout):
                await until_listens(family, (ranks.store_address, ranks.store_port), STORE_INTERVAL)
                return LONG_STORE_TIMEOUT
        return STORE_TIMEOUT

    def note_trained(self) -> None:
        """Take from a worker that it has joined the others: its group may not need the store of the round."""
        self._has_trained = True

    def carry_on(self, ranks: RankAssignment) -> None:
        """Observe the next round, with the same marks: some of its workers are those of the last one."""
        self.marks.read()
        self.marks.announce(False)
        self._ranks = ranks
        self._began = time.monotonic()
        self._has_trained = self.marks.any = False

    def has_trained(self) -> bool:
        """Whether the workers have begun to train, as far as this node can observe. It reads the kernel's whole table
        of connections, so do not call it often.

        The node that hosts the store sees the connections of all workers, every other node those of its own.
        """
        self.marks.read()
        if time.monotonic() - self._began >= STARTUP_SECONDS or self._has_trained or self.marks.any:
            return True
        is_host = self._ranks.node_rank == 0
        try:
            texts = [table.read_text() for table in TABLES if table.exists()]
        except OSError:
            return True
        clients = store_clients(texts, self._ranks.store_port)
        return not texts or len(clients) >= (self._ranks.world_size if is_host else self._ranks.workers)

    def close(self) -> None:
        """Close the pipes."""
        self.marks.close()


def store_clients(tables: Iterable[str], port: int) -> set[str]:
    """The client's end of each connection to a store on `port` in texts such as /proc/net/tcp.

    Each rank of torch holds one connection at least, the one that hosts the store too. After the end of a worker the
    kernel shows a connection from that end alone which was closed first, so either counts.
    """
    found = set()
    for table in tables:
        for line in table.splitlines()[1:]:
            fields = line.split()
            if len(fields) < 4 or fields[3] in _NO_CONNECTION:
                continue
            local, remote = (field.removeprefix(_MAPPED) for field in fields[1:3])
            if _port(local) == port:
                found.add(remote)
            elif _port(remote) == port:
                found.add(local)
    return found


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2], 16)
