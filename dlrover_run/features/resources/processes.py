"""The processors and the memory of a worker and the processes below it, read by psutil.

psutil finds children by reading every process of the machine, so the kernel's own list of children is read in its place
(`tree.below`): with 230 processes that takes a tenth of the time. The kernel has a list for each thread, and to read
one takes some 36 microseconds.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import psutil

from dlrover_run.processes import tree

MAX_PROCESSES = 256
"""Processes of one worker that are read: each takes some 90 microseconds, and those of its threads."""

EXACT_SHARE = 0.5
"""The part of the memory limit above which pages that a worker shares with its children are counted once. A data loader
that was forked shares all data of its worker, so that sizes of processes would add up to more than there is."""

EXACT_INTERVAL = 30.0
"""Seconds between two exact readings: the kernel walks all pages of a process, some 20 milliseconds for each GiB."""


class ProcessUse(NamedTuple):
    """`memory` are resident bytes, `processors` the number of processors kept busy since the sample before, None in the
    first one."""

    memory: int
    processors: float | None
    pids: frozenset[int]


class WorkerMeter:
    """Reads one worker again and again. `limit` are the bytes that it may use."""

    def __init__(self, pid: int, limit: int) -> None:
        self._pid = pid
        self._limit = limit
        self._processes: dict[int, psutil.Process] = {}
        self._busy: dict[int, float] = {}
        self._has_read_all = True
        self._read_at: float | None = None
        self._exact_at = float("-inf")
        self._exact_ratio = 1.0

    def read(self, now: float) -> ProcessUse | None:
        """What it uses; None for one that has ended. `now` is on the monotonic clock."""
        spent, sizes, busy = 0.0, 0, dict[int, float]()
        pids = self._below()
        self._processes = {pid: known for pid in pids if (known := self._known(pid)) is not None}
        for pid, process in self._processes.items():
            with contextlib.suppress(psutil.Error), process.oneshot():
                times, memory = process.cpu_times(), process.memory_info()
                busy[pid] = times.user + times.system
                # A process that began after the sample before has used all of its time since; one that was left out
                # of that sample may have used it long before.
                spent += busy[pid] - self._busy.get(pid, 0.0 if self._has_read_all else busy[pid])
                # Files and shared memory that a child has mapped are the worker's too.
                sizes += memory.rss if pid == self._pid else max(0, memory.rss - memory.shared)
        self._has_read_all = len(pids) < MAX_PROCESSES
        if self._pid not in busy:
            return None
        before, self._read_at, self._busy = self._read_at, now, busy
        processors = None if before is None or now <= before else max(0.0, spent) / (now - before)
        return ProcessUse(self._without_shared(sizes, now), processors, frozenset(busy))

    def _below(self) -> list[int]:
        return tree.below(self._pid, MAX_PROCESSES)

    def _known(self, pid: int) -> psutil.Process | None:
        """The process by which this pid is known, unless the kernel has given the pid to another one."""
        known = self._processes.get(pid)
        with contextlib.suppress(psutil.Error):
            if known is None or not known.is_running():
                self._busy.pop(pid, None)
                return psutil.Process(pid)
            return known
        return None

    def _without_shared(self, sizes: int, now: float) -> int:
        if len(self._processes) == 1 or sizes < EXACT_SHARE * self._limit:
            return sizes
        if now - self._exact_at >= EXACT_INTERVAL:
            self._exact_at, exact = now, 0
            for process in self._processes.values():
                with contextlib.suppress(psutil.Error, AttributeError):
                    exact += process.memory_full_info().pss
            # Nothing where the kernel does not show it.
            self._exact_ratio = min(1.0, exact / sizes) if exact else 1.0
        return round(sizes * self._exact_ratio)
