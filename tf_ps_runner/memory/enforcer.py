"""Enforces the memory limit of one task, in the best way that this machine allows, and detects out-of-memory kills.

SIGKILL alone proves nothing, since users and schedulers send that too; and a task whose child was killed may exit with
any code. The evidence is the kernel's count of out-of-memory kills in the task's own control group; without a group the
record of its watch, or what `failures.oom_kills` reads of the launcher's own group and of the machine. In version 1
how often a limit was hit (`failcnt`) proves nothing: there are kernels where it stays 0.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable
from functools import cache
from typing import Literal, NamedTuple

from dlrover_run.failures.oom_kills import OomKillCounters
from dlrover_run.processes import tree
from tf_ps_runner.cluster.text import memory_size
from tf_ps_runner.memory.task_cgroup import CgroupParent, TaskCgroup, find_cgroup_parent, remove_leftover_groups
from tf_ps_runner.memory.watch import ProcessTreeWatch, usage_of

NEAR_LIMIT = 0.9
"""The part of its limit above which a task is near it: a server is then replaced in a planned change, before it is
killed. Closer would leave too little time to save; further would replace healthy servers."""


def is_near_limit(usage: int, limit: int) -> bool:
    """Whether a task with this usage is near its limit, both in MiB. A limit of 0 is none."""
    return limit > 0 and usage > limit * NEAR_LIMIT


class GroupCounters(NamedTuple):
    """What the kernel has counted in the group of a task, None where that cannot be read: its processes that were
    killed for memory, for its own limit or another one, and how often its own was hit."""

    kills: int | None
    hits: int | None


def explain_group_kill(code: int, before: GroupCounters, after: GroupCounters, limit: int) -> str | None:
    """Why a task was killed for lack of memory, as a clause that follows the text of its exit; None if it was not.

    `code` is its exit code, below 0 for a signal; the counters are those before it started and after it ended; `limit`
    is in MiB. A task that succeeded did so in spite of a killed child.
    """
    if code == 0 or before.kills is None or after.kills is None or after.kills <= before.kills:
        return None
    who = "it" if code == -signal.SIGKILL else "a child process of it"
    if before.hits is not None and after.hits is not None and after.hits <= before.hits:
        return (
            f"the kernel killed {who} for lack of memory below its limit of {memory_size(limit)}: the limit of "
            "the container was reached, or the machine had run out"
        )
    if code == -signal.SIGKILL:
        return f"it used more than its memory limit of {memory_size(limit)}"
    return f"{who} was killed, because together they used more than the memory limit of {memory_size(limit)}"


class MemoryEnforcer:
    """One task's memory limit, from before it starts until it has ended. Create it with `open`.

    Pages that the template touched before it forked the task stay charged to the launcher's own group, so a forked task
    can use that much more than a spawned one.
    """

    def __init__(self, limit: int, group: TaskCgroup | None) -> None:
        self._limit = limit
        self._group = group
        self._counters = _counters(group) if group else None
        self._oom_kills = None if group else _launcher_kills()
        self._watch: ProcessTreeWatch | None = None
        self._pid: int | None = None

    @classmethod
    def open(cls, task_name: str, limit_mib: int) -> MemoryEnforcer:
        """The limit of a task that is about to start; 0 is none. It never fails: without a control group the task is
        watched."""
        parent = _cgroup_parent() if limit_mib else None
        group = None
        if parent is not None:
            with contextlib.suppress(OSError):
                group = TaskCgroup(parent, task_name, limit_mib)
        return cls(limit_mib, group)

    @property
    def kept_by(self) -> Literal["group", "watch", "nothing"]:
        """How the limit is enforced: by a control group of its own, by watching its processes, or not at all if there
        is no limit."""
        if not self._limit:
            return "nothing"
        return "group" if self._group else "watch"

    def enter(self) -> None:
        """Put the calling process under the limit: for a child between fork and exec, so that everything the new
        program uses is counted. If it fails, `place` does what is possible."""
        if self._group is not None:
            with contextlib.suppress(OSError):
                self._group.add(os.getpid())

    def place(self, pid: int, failed: Callable[[Exception], None]) -> None:
        """Put a process that has just started, a child of this one, under the limit. Needs a running loop. `failed` is
        called with an internal error of a watch, which goes on."""
        self._pid = pid
        if self._group is not None:
            try:
                self._group.add(pid)
            except ProcessLookupError:
                # It has ended already; what `enter` has done for it holds.
                return
            except OSError:
                self._group.close()
                self._group = None
        if self._limit and self._group is None:
            self._watch = ProcessTreeWatch(pid, self._limit, failed)

    def usage(self) -> int:
        """MiB that the task and its descendants use now."""
        if self._group is not None:
            return self._group.usage
        if self._pid is None:
            return 0
        return usage_of(tree.below(self._pid), self._limit * NEAR_LIMIT if self._limit else math.inf)

    @property
    def near_memory_limit(self) -> bool:
        """Whether the task is near its limit. The agent asks once a second, so that the counters of a moment ago are
        known when the task ends."""
        if self._oom_kills is not None:
            self._oom_kills.note()
        return bool(self._limit) and is_near_limit(self.usage(), self._limit)

    def explain_memory_kill(self, exit_code: int) -> str | None:
        """Why a task with this exit code, below 0 for a signal, was killed for lack of memory, as a clause that follows
        the text of its exit; None if it was not. Call it after the task has ended and before `close`."""
        if self._watch is not None and self._watch.exceeded_with is not None and exit_code != 0:
            used, limit = memory_size(self._watch.exceeded_with), memory_size(self._limit)
            return f"it used {used}, and its memory limit is {limit}"
        if self._group is not None and self._counters is not None:
            return explain_group_kill(exit_code, self._counters, _counters(self._group), self._limit)
        # The machine itself may have run out of memory, or the launcher's own group.
        return self._oom_kills.explain(self._pid) if self._oom_kills and exit_code == -signal.SIGKILL else None

    def close(self) -> None:
        """The task has ended. What it left in its group is killed."""
        self._pid = None
        if self._watch is not None:
            self._watch.close()
        if self._group is not None:
            self._group.close()
            self._group = None


def _counters(group: TaskCgroup) -> GroupCounters:
    return GroupCounters(group.kills, group.hits)


@cache
def _launcher_kills() -> OomKillCounters:
    """The counters of the launcher's own group. All tasks share them: a kill explains the end of one."""
    return OomKillCounters()


@cache
def _cgroup_parent() -> CgroupParent | None:
    """Where this launcher creates its groups, searched for once; groups that killed launchers left there are removed
    first."""
    parent = find_cgroup_parent()
    if parent is not None:
        remove_leftover_groups(parent)
    return parent
