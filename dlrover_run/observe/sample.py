"""Takes the evidence of all workers of this node, and no more of it than their steps leave in doubt: one request to the
kernel for their connections, and the figures of each process."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol

from dlrover_run.observe import processes
from dlrover_run.observe.carriers import Carriers
from dlrover_run.observe.records import Evidence, Traffic, summarize
from dlrover_run.observe.sock_diag import SockDiag, SocketCounters, TooManySockets
from dlrover_run.processes.tree import read_stat

SAMPLES_PER_READ = 4
"""As long as each worker counts steps between two samples, connections are read in one sample of so many: that takes
most of the time of a sample, and says nothing more of a stall."""

STEADY = 3
"""Samples in succession in which each worker has counted steps, before its connections are read less often."""

FULL_SAMPLES = 2
"""Samples with all evidence, soon after each other, once not all workers have counted steps any more."""


class Sampling(Protocol):
    """What reads samples: `Sampler`."""

    def sample(self, full: bool) -> list[Evidence]: ...

    def repeat(self) -> list[Evidence]: ...

    def forget(self, rank: int) -> None: ...

    def close(self) -> None: ...


class Sampler:
    """Samples the workers of one round. `pids` are their pids by rank; `store_port` is 0 if they have no store.

    A connection belongs to the worker that held it when it was first seen: looking at all descriptors of all workers
    costs more than everything else, so it is done only for a connection that is new.
    """

    def __init__(self, pids: Mapping[int, int], store_port: int) -> None:
        self._pids = dict(pids)
        self._store_port = store_port
        self._diag: SockDiag | None = None
        self._carriers = Carriers()
        self._holders: dict[int, int | None] = {}
        self._traffic: dict[int, Traffic] = {}

    def sample(self, full: bool) -> list[Evidence]:
        """The evidence of each worker that runs; without `full` that of the connections alone. Raises OSError."""
        at = time.monotonic()
        by_rank = self._assign(self._dump())
        self._carriers.take([one for held in by_rank.values() for one in held], at)
        found = []
        for rank, pid in self._pids.items():
            figures = processes.read_worker(pid) if full else None
            if full and figures is None:
                continue
            self._traffic[rank] = summarize(by_rank.get(rank, []), self._store_port, self._carriers)
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


class AdaptiveSampler:
    """Decides how much each sample of the workers of one round reads, by their steps."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._ranks: tuple[int, ...] = ()
        self._counts: Mapping[int, int] = {}
        # Samples in succession in which each worker has counted steps, and how many are still to be taken soon.
        self._steady = 0
        self._full_left = 0

    @property
    def is_urgent(self) -> bool:
        """Whether workers have just stopped counting steps, so that the next sample is to be taken soon."""
        return self._full_left > 0

    def take(self, steps: Mapping[int, int], needs_figures: bool, knows_limit: bool) -> tuple[list[Evidence], bool]:
        """The evidence of all workers, and whether it has the figures of their processes; they are there if the
        detector needs them. `knows_limit`: it knows how long a pause may be."""
        before, self._counts = self._counts, steps
        if self._ranks and all(rank in before and steps.get(rank, -1) > before[rank] for rank in self._ranks):
            self._steady += 1
        else:
            self._full_left = FULL_SAMPLES if self._steady > STEADY else self._full_left
            self._steady = 0
        full = self._full_left > 0 or needs_figures
        if self._steady > STEADY and self._steady % SAMPLES_PER_READ and knows_limit and not full:
            samples, full = self._sampling.repeat(), False
        else:
            self._full_left = max(0, self._full_left - 1)
            samples = self._sampling.sample(full)
        if samples:
            self._ranks = tuple(one.rank for one in samples)
        return samples, full

    def forget(self, rank: int) -> None:
        """Leave out a worker that has ended."""
        self._sampling.forget(rank)

    def close(self) -> None:
        self._sampling.close()


def _check_proc() -> None:
    """Raise OSError if /proc shows not even this process: workers of which it shows nothing may then run."""
    try:
        read_stat(os.getpid())
    except OSError as error:
        raise OSError(error.errno, f"the kernel does not show processes (/proc: {error.strerror})") from error
