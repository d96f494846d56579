"""Takes the evidence of all workers of this node: one request to the kernel for their connections, and, where the
caller wants them, the figures of each process."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Mapping

from dlrover_run.observe import processes
from dlrover_run.observe.records import Evidence, Traffic, summarize
from dlrover_run.observe.sock_diag import SockDiag, SocketCounters, TooManySockets
from dlrover_run.processes.tree import read_stat


class Sampler:
    """Samples the workers of one round. `pids` are their pids by rank; `store_port` is 0 if they have no store.

    A connection belongs to the worker that held it when it was first seen: looking at all descriptors of all workers
    costs more than everything else, so it is done only for a connection that is new.
    """

    def __init__(self, pids: Mapping[int, int], store_port: int) -> None:
        self._pids = dict(pids)
        self._store_port = store_port
        self._diag: SockDiag | None = None
        self._holders: dict[int, int | None] = {}
        self._traffic: dict[int, Traffic] = {}

    def sample(self, full: bool) -> list[Evidence]:
        """The evidence of each worker that runs; without `full` that of the connections alone. Raises OSError."""
        at = time.monotonic()
        by_rank = self._assign(self._dump())
        found = []
        for rank, pid in self._pids.items():
            figures = processes.read_worker(pid) if full else None
            if full and figures is None:
                continue
            self._traffic[rank] = summarize(by_rank.get(rank, []), self._store_port)
            found.append(Evidence(rank, at, self._traffic[rank], figures))
        if full and self._pids and not found:
            _check_proc()
        return found

    def repeat(self) -> list[Evidence]:
        """The connections as the last sample found them, for each worker that was in it: nothing is read."""
        at = time.monotonic()
        return [Evidence(rank, at, self._traffic[rank], repeated=True) for rank in self._pids if rank in self._traffic]

    def watch(self, rank: int, pid: int) -> None:
        """Sample another worker too."""
        self._pids[rank] = pid

    def forget(self, rank: int) -> None:
        """Leave out a worker that has ended."""
        self._pids.pop(rank, None)
        self._traffic.pop(rank, None)

    def close(self) -> None:
        if self._diag is not None:
            self._diag.close()
            self._diag = None

    def _dump(self) -> list[SocketCounters]:
        try:
            if self._diag is None:
                self._diag = SockDiag()
            return self._diag.dump()
        except TooManySockets:
            raise
        except OSError as error:
            # The next sample begins with a new one.
            self.close()
            raise OSError(error.errno, f"the kernel does not show connections (sock_diag: {error.strerror})") from error

    def _assign(self, sockets: list[SocketCounters]) -> dict[int, list[SocketCounters]]:
        here = {one.inode for one in sockets}
        for inode in self._holders.keys() - here:
            # The kernel may give its inode to another one.
            del self._holders[inode]
        if unknown := here - self._holders.keys():
            self._holders.update(dict.fromkeys(unknown))
            for rank, pid in self._pids.items():
                for inode in processes.socket_inodes(pid) & unknown:
                    self._holders[inode] = rank
        by_rank: dict[int, list[SocketCounters]] = defaultdict(list)
        for one in sockets:
            rank_of = self._holders[one.inode]
            if rank_of is not None:
                by_rank[rank_of].append(one)
        return by_rank


def _check_proc() -> None:
    """Raise OSError if /proc shows not even this process: workers of which it shows nothing may then run."""
    try:
        read_stat(os.getpid())
    except OSError as error:
        raise OSError(error.errno, f"the kernel does not show processes (/proc: {error.strerror})") from error
