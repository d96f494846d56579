"""What holds one task to its memory, in the best way that this machine allows."""

from __future__ import annotations

import contextlib
import os
from functools import cache
from typing import Literal

from dlrover_run.failures.oom_kills import OomMonitor
from tf_ps_runner.memory import verdict
from tf_ps_runner.memory.cgroups import Place, TaskGroup, clear_leftovers, find_place
from tf_ps_runner.memory.limits import NO_LIMIT, SWOLLEN_PART, is_swollen
from tf_ps_runner.memory.watching import TreeWatch, processes_of, usage_of


class MemoryHold:
    """One task's limit of memory, from before it starts until it has ended. Make one with `open`.

    `kept_by` says how it is kept: by a control group of its own, by watching its processes (see `watching` for what
    that lets through), or by nothing where there is no limit. Pages that the template had touched before it forked the
    task stay charged to the launcher's own group, so a forked task has so much more than one that was spawned.
    """

    def __init__(self, limit: int, group: TaskGroup | None) -> None:
        self._limit = limit
        self._group = group
        self._kills = group.kills if group else None
        self._machine = None if group else OomMonitor()
        self._watch: TreeWatch | None = None
        self._pid: int | None = None

    @classmethod
    def open(cls, task_name: str, limit_mib: int) -> MemoryHold:
        """A hold for a task that is about to start; a limit of 0 is none. It never fails: what cannot be kept by a
        control group is watched."""
        place = _place() if limit_mib else None
        group = None
        if place is not None:
            with contextlib.suppress(OSError):
                group = TaskGroup(place, task_name, limit_mib)
        return cls(limit_mib, group)

    @property
    def kept_by(self) -> Literal["group", "watch", "nothing"]:
        """How the limit is kept."""
        if not self._limit:
            return "nothing"
        return "group" if self._group else "watch"

    def enter(self) -> None:
        """Put the calling process under the limit: for a child of ours between fork and exec, so that all that the new
        program takes is counted. Where it cannot be done, `place` does what can."""
        if self._group is not None:
            with contextlib.suppress(OSError):
                self._group.take(os.getpid())

    def place(self, pid: int) -> None:
        """Put a process that has just started, a child of this one, under the limit. A running loop is needed."""
        self._pid = pid
        if self._group is not None:
            try:
                self._group.take(pid)
            except ProcessLookupError:
                # It has ended already; what `enter` has done for it holds.
                return
            except OSError:
                self._group.close()
                self._group = None
        if self._limit and self._group is None:
            self._watch = TreeWatch(pid, self._limit)

    def usage(self) -> int:
        """MiB that the task and what it started use now."""
        if self._group is not None:
            return self._group.usage
        if self._pid is None:
            return 0
        enough = int(self._limit * SWOLLEN_PART) if self._limit else NO_LIMIT
        return usage_of(list(processes_of(self._pid)), enough)

    @property
    def swollen(self) -> bool:
        """Whether the task is near its limit now."""
        return bool(self._limit) and is_swollen(self.usage(), self._limit)

    def killed_for_memory(self, exit_code: int) -> str | None:
        """Why a task that has ended with this code, below 0 for a signal, was ended for memory, in a clause without its
        name; None where it was not. To be asked once it has ended and before `close`."""
        if self._watch is not None and self._watch.excess is not None and exit_code != 0:
            return verdict.explain_watched(self._watch.excess, self._limit)
        if self._group is not None:
            return verdict.explain_end(exit_code, self._kills, self._group.kills, self._limit)
        # The machine itself may have run out, or the launcher's own group.
        return verdict.explain_unlimited(exit_code, self._machine.explain() if self._machine else None)

    def close(self) -> None:
        """Let go of it: the task has ended. What it left in its group is killed."""
        self._pid = None
        if self._watch is not None:
            self._watch.close()
        if self._group is not None:
            self._group.close()
            self._group = None


@cache
def _place() -> Place | None:
    """Where this launcher makes its groups, looked for once; what killed ones have left there is cleared first."""
    place = find_place()
    if place is not None:
        clear_leftovers(place)
    return place
