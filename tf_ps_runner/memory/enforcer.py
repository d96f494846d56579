"""Enforces the memory limit of one task, in the best way that this machine allows, and says whether a task was killed
for it.

An end by SIGKILL alone proves nothing, since users and schedulers send that too; and a task whose child was killed may
exit with any code. What decides is the kernel's count of out-of-memory kills in the task's own control group, or what
its watch has seen. How often the limit was hit (`failcnt`) proves nothing: there are kernels where it stays 0.
"""

from __future__ import annotations

import contextlib
import os
import signal
from functools import cache
from typing import Literal

from dlrover_run.failures import describe_signal
from dlrover_run.failures.oom_kills import OomMonitor
from dlrover_run.policies.parameter_servers.text import memory_size
from tf_ps_runner.memory import NEAR_LIMIT, NO_LIMIT, is_near_limit
from tf_ps_runner.memory.cgroups import (
    CgroupParent,
    TaskCgroup,
    find_cgroup_parent,
    remove_leftover_groups,
)
from tf_ps_runner.memory.process_tree import ProcessTreeWatch, processes_of, usage_of


def explain_end(code: int, kills_before: int | None, kills_after: int | None, limit: int) -> str | None:
    """A clause without the task's name when it ended for memory, else None.

    `code` is its exit code, below 0 for a signal; the kills are the count of its group before it started and after it
    ended, None where that cannot be read; `limit` is in MiB. A task that ended well did so in spite of a killed child.
    """
    if code == 0 or kills_before is None or kills_after is None or kills_after <= kills_before:
        return None
    if code == -signal.SIGKILL:
        return f"was killed for memory: it took more than the {memory_size(limit)} that it may"
    return (
        f"{_left(code)} after a child of it was killed for memory: together they took more than the "
        f"{memory_size(limit)} that they may"
    )


def explain_watched(usage: int, limit: int) -> str:
    """A clause about a task that was killed by its watch, both in MiB."""
    return f"was killed for memory: it took {memory_size(usage)}, and may take {memory_size(limit)}"


def explain_unlimited(code: int, evidence: str | None) -> str | None:
    """A clause about a task without a limit that SIGKILL ended, if there is evidence of a kill for memory."""
    return f"was killed for memory: {evidence}" if code == -signal.SIGKILL and evidence else None


def _left(code: int) -> str:
    return f"left with exit code {code}" if code > 0 else f"was ended by {describe_signal(-code)}"


class MemoryEnforcer:
    """One task's memory limit, from before it starts until it has ended. Create it with `open`.

    `kept_by` says how the limit is enforced: by a control group of its own, by watching its processes (see
    `process_tree` for what that lets through), or by nothing if there is no limit. Pages that the template touched
    before it forked the task stay charged to the launcher's own group, so a forked task can use that much more than a
    spawned one.
    """

    def __init__(self, limit: int, group: TaskCgroup | None) -> None:
        self._limit = limit
        self._group = group
        self._kills = group.kills if group else None
        self._machine = None if group else OomMonitor()
        self._watch: ProcessTreeWatch | None = None
        self._pid: int | None = None

    @classmethod
    def open(cls, task_name: str, limit_mib: int) -> MemoryEnforcer:
        """The limit of a task that is about to start; 0 is none. It never fails: what no control group can enforce is
        watched."""
        place = _place() if limit_mib else None
        group = None
        if place is not None:
            with contextlib.suppress(OSError):
                group = TaskCgroup(place, task_name, limit_mib)
        return cls(limit_mib, group)

    @property
    def kept_by(self) -> Literal["group", "watch", "nothing"]:
        """How the limit is enforced."""
        if not self._limit:
            return "nothing"
        return "group" if self._group else "watch"

    def enter(self) -> None:
        """Put the calling process under the limit: for a child between fork and exec, so that everything the new
        program uses is counted. If it fails, `place` does what is possible."""
        if self._group is not None:
            with contextlib.suppress(OSError):
                self._group.take(os.getpid())

    def place(self, pid: int) -> None:
        """Put a process that has just started, a child of this one, under the limit. Needs a running loop."""
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
            self._watch = ProcessTreeWatch(pid, self._limit)

    def usage(self) -> int:
        """MiB that the task and its descendants use now."""
        if self._group is not None:
            return self._group.usage
        if self._pid is None:
            return 0
        enough = int(self._limit * NEAR_LIMIT) if self._limit else NO_LIMIT
        return usage_of(list(processes_of(self._pid)), enough)

    @property
    def near_memory_limit(self) -> bool:
        """Whether the task is near its limit now."""
        return bool(self._limit) and is_near_limit(self.usage(), self._limit)

    def killed_for_memory(self, exit_code: int) -> str | None:
        """Why a task that has ended with this code, below 0 for a signal, was ended for memory, as a clause without its
        name; None if it was not. To be called once it has ended and before `close`."""
        if self._watch is not None and self._watch.exceeded_with is not None and exit_code != 0:
            return explain_watched(self._watch.exceeded_with, self._limit)
        if self._group is not None:
            return explain_end(exit_code, self._kills, self._group.kills, self._limit)
        # The machine itself may have run out of memory, or the launcher's own group.
        return explain_unlimited(exit_code, self._machine.explain() if self._machine else None)

    def close(self) -> None:
        """The task has ended. What it left in its group is killed."""
        self._pid = None
        if self._watch is not None:
            self._watch.close()
        if self._group is not None:
            self._group.close()
            self._group = None


@cache
def _place() -> CgroupParent | None:
    """Where this launcher creates its groups, looked for once; groups that killed launchers left there are removed
    first."""
    place = find_cgroup_parent()
    if place is not None:
        remove_leftover_groups(place)
    return place
