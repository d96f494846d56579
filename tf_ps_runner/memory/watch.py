"""Enforces a task's memory limit if no control group can: checks its processes, and kills them above the limit.

A fast task uses some 200 MiB more between two checks before it is killed, so this is the second choice. Each process is
checked in /proc, which costs microseconds. Pages shared with the template count only by its share; that takes a slower
check, which is made only if the quick one exceeds the limit.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable

from dlrover_run.background import Background, every
from dlrover_run.processes import tree
from tf_ps_runner.memory import MIB

CHECK_INTERVAL = 0.2
"""Seconds between two checks of a task that has a limit. The kernel does not notify of a process's size; a shorter
interval would use more of a processor, a longer one would let a fast task use more before it is killed."""

_PAGE = os.sysconf("SC_PAGE_SIZE")


class ProcessTreeWatch:
    """Watches one process and its descendants until `close`. Needs a running loop. `failed` is called with an internal
    error of a check, after which the next one follows.

    `exceeded_with` is what they used together, in MiB, when they were killed for it; None as long as they were not.
    """

    def __init__(self, pid: int, limit: int, failed: Callable[[Exception], None]) -> None:
        self.exceeded_with: int | None = None
        self._pid = pid
        self._limit = limit
        self._background = Background(failed)
        self._background.start(every(CHECK_INTERVAL, self._check, failed))

    def close(self) -> None:
        self._background.cancel()

    def _check(self) -> None:
        processes = tree.below(self._pid)
        usage = usage_of(processes, self._limit)
        if usage <= self._limit:
            return
        self.exceeded_with = usage
        self.close()
        # The first is a child that was not reaped, or this watch would be closed; the others had no time to end and to
        # have their pids reused.
        for pid in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def usage_of(pids: list[int], enough: float) -> int:
    """MiB of memory of these processes. Memory shared with others counts in full as long as the sum is at most
    `enough`, else by share."""
    if (quick := sum(map(_anonymous, pids))) <= enough * MIB:
        return quick // MIB
    return sum(map(_share, pids)) // MIB


def cpu_seconds(pids: Iterable[int]) -> float:
    """Seconds that all threads of these processes have run on processors; those that have ended do not count."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            _, fields = tree.read_stat(pid)
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _anonymous(pid: int) -> int:
    """Bytes of its own in memory, including those that it still shares with the process that it was forked from."""
    try:
        with open(f"/proc/{pid}/statm") as statm:
            _, resident, of_files, *_ = map(int, statm.read().split())
    except (OSError, ValueError):
        return 0
    return (resident - of_files) * _PAGE


def _share(pid: int) -> int:
    """Bytes in memory that are no file's, each page divided by the number of processes that have it."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            sizes = {line.partition(":")[0]: line.split() for line in rollup}
        return sum(int(sizes[name][1]) for name in ("Pss_Anon", "Pss_Shmem")) * 1024
    except (OSError, LookupError, ValueError):
        # Kernels before 5.8 do not report them separately, and a process may just have ended.
        return _anonymous(pid)
