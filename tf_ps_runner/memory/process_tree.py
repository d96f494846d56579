"""Holds a task to its memory where no control group can: looks at its processes, and kills them above the limit.

A fast task takes some 200 MiB more between two looks before it is killed, so this is the second choice. Each process
is looked at in /proc, where reading costs microseconds; pages that it has in common with the template count in it only
by its share, which takes a longer look and is taken only where the short one says too much.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator

from tf_ps_runner.memory import MIB

CHECK_INTERVAL = 0.2
"""Seconds between two looks at a task that has a limit. The kernel tells nobody of a process's size, so somebody has
to look; less would take more of a processor, more would let a fast task take more before it is killed."""

_PAGE = os.sysconf("SC_PAGE_SIZE")


class ProcessTreeWatch:
    """Watches one process and what it starts until `close`. A running loop is needed.

    `exceeded_with` is what they took together, in MiB, when they were killed for it; None as long as they were not.
    """

    def __init__(self, pid: int, limit: int, on_kill: Callable[[], None] = lambda: None) -> None:
        self.exceeded_with: int | None = None
        self._pid = pid
        self._limit = limit
        self._on_kill = on_kill
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_soon(self._check)

    def close(self) -> None:
        """Look no more."""
        self._next.cancel()

    def _check(self) -> None:
        tree = list(processes_of(self._pid))
        usage = usage_of(tree, self._limit)
        if usage <= self._limit:
            self._next = self._loop.call_later(CHECK_INTERVAL, self._check)
            return
        self.exceeded_with = usage
        # The first is our child that nobody has collected, or this watch would be closed; and the others had no time to
        # end and to have their numbers given away.
        for pid in tree:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._on_kill()


def processes_of(pid: int) -> Iterator[int]:
    """A process and all that descend from it, those left out whose parent has ended; the nearest first."""
    waiting = [pid]
    while waiting:
        here = waiting.pop(0)
        yield here
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{here}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{here}/task/{thread}/children") as children:
                    waiting += map(int, children.read().split())


def usage_of(pids: list[int], enough: int) -> int:
    """How many MiB these processes have in memory. What they share with others counts in full as long as that comes to
    no more than `enough`, else by their share."""
    if (quick := sum(map(_anonymous, pids))) <= enough * MIB:
        return quick // MIB
    return sum(map(_share, pids)) // MIB


def _anonymous(pid: int) -> int:
    """Bytes of its own in memory, those included that it still has in common with whom it was forked from."""
    try:
        with open(f"/proc/{pid}/statm") as statm:
            _, resident, of_files, *_ = map(int, statm.read().split())
    except (OSError, ValueError):
        return 0
    return (resident - of_files) * _PAGE


def _share(pid: int) -> int:
    """Bytes in memory that are no file's, each page divided by the number of those that have it."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            sizes = {line.partition(":")[0]: line.split() for line in rollup}
        return sum(int(sizes[name][1]) for name in ("Pss_Anon", "Pss_Shmem")) * 1024
    except (OSError, LookupError, ValueError):
        # Kernels before 5.8 do not tell them apart, and a process may just have ended.
        return _anonymous(pid)
