"""Whether the kernel's out-of-memory killer ended a worker, from the counters of the control groups.

A process killed for lack of memory dies of SIGKILL like any other. But the kernel counts such kills for each control
group, so a count that rose in the seconds before the death is evidence. A count that rose earlier is none: a data
loader's child may have been killed days before. So the count is read once a second (`note`), and each rise explains one
end.

`workers.cause_collector` asks for a worker, and `tf_ps_runner.memory.enforcer` for a task that has no control group of
its own. The answer is `WorkerExit.oom_kill`, which everything later reads: `failures.causes` for texts and causes, and
`tf_ps_runner.agent.exits` for what the end costs. Its exit code is that of any SIGKILL, 137.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Hashable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from dlrover_run.devices.cgroups import cgroup_directories, read_cgroup_field, read_cgroup_number
from dlrover_run.words.text import format_bytes

_NO_LIMIT = 1 << 60
"""cgroup v1 has a number about as large as the address space for no limit."""


NOTE_INTERVAL = 1.0
"""Seconds between two calls of `note`."""

MIN_DEATH = 1.0
"""Seconds from the moment at which the kernel counts a kill to the end of the process, without the time for its
memory."""

FREED_PER_SECOND = 8 << 30
"""Bytes that the kernel frees in a second, at least, when a killed process ends."""

REACHED_WITHIN = 1 << 20
"""Bytes below the limit at which it counts as reached: the kernel charges memory in batches."""

_ALL_GROUPS = "cgroup:[4026531835]"
"""The namespace of control groups of the machine itself (PROC_CGROUP_INIT_INO). In another one the limits above the
container cannot be seen."""


class CgroupCounters(msgspec.Struct, frozen=True):
    """One control group: its limit in bytes (None: no limit), how many of its processes were killed for lack of memory,
    and how often its own limit was hit. `kills` and `hits` are None if unknown. `reached`: its use of memory has been
    at the limit once; only known in version 1."""

    path: str
    limit: int | None
    kills: int | None
    hits: int | None
    reached: bool = False


class MemoryCounters(msgspec.Struct, frozen=True):
    """This process's control group and its ancestors, nearest first, and the out-of-memory kills of the machine.
    `whole`: these are all ancestors, so that no limit above them can be the cause."""

    groups: tuple[CgroupCounters, ...]
    machine_kills: int | None
    whole: bool = False


class OomKillCounters:
    """The counters a moment ago, to compare with those after the death of a process. `now` is a monotonic clock."""

    def __init__(self, proc: Path = Path("/proc"), now: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._now = now
        self._noted = deque([(now(), read_counters(proc))])
        self._explained: dict[Hashable, str | None] = {}
        self._death = MIN_DEATH + _most_memory(proc, self._noted[0][1]) / FREED_PER_SECOND

    def note(self) -> None:
        """Remember the counters of this moment. Call it every NOTE_INTERVAL while processes run that may be killed."""
        now = self._now()
        if len(self._noted) > 1 and now - self._noted[-1][0] < NOTE_INTERVAL / 2:
            return  # Several tasks share these counters.
        self._noted.append((now, read_counters(self._proc)))
        while len(self._noted) > 1 and self._noted[1][0] <= now - self._death:
            self._noted.popleft()

    def explain(self, which: Hashable = None) -> str | None:
        """A clause on an out-of-memory kill a moment ago, such as `the kernel's memory limit was hit (cgroup limit 512
        MiB)`, or None. A kill explains one end: a further process gets None unless there was another kill. `which` is
        that process, which gets the same answer again; None: the next one."""
        if which is not None and which in self._explained:
            return self._explained[which]
        after = read_counters(self._proc)
        clause = explain_oom_kill(self._noted[0][1], after)
        if clause is not None:
            self._noted = deque((at, _without_one_kill(counters, after)) for at, counters in self._noted)
        if which is not None:
            self._explained[which] = clause
        return clause


def _without_one_kill(before: MemoryCounters, after: MemoryCounters) -> MemoryCounters:
    """`before`, as if one of the kills since had been counted then."""

    def counted(then: int | None, later: int | None) -> int | None:
        return then if then is None or later is None else min(then + 1, later)

    later = {group.path: group.kills for group in after.groups}
    groups = tuple(replace(group, kills=counted(group.kills, later.get(group.path))) for group in before.groups)
    return replace(before, groups=groups, machine_kills=counted(before.machine_kills, after.machine_kills))


def _most_memory(proc: Path, counters: MemoryCounters) -> int:
    """The most memory in bytes that a process can have."""
    limits = [group.limit for group in counters.groups if group.limit is not None]
    machine = read_cgroup_field(proc / "meminfo", "MemTotal:")
    return min([*limits, *([] if machine is None else [machine << 10])], default=0)


def explain_oom_kill(before: MemoryCounters, after: MemoryCounters) -> str | None:
    """A clause on a process of this control group that died of SIGKILL between the two readings, or None.

    The group's own count of kills decides. The limit is that of the nearest group with a limit whose own count rose, or
    else whose use has reached it: in version 1 that count stays 0 where memory and memory with swap have one limit, as
    in a container. If there is none, the machine had run out of memory, unless there are groups that cannot be seen
    from here. If the group's counters cannot be read, a kill anywhere on the machine is weaker evidence, and the text
    is as cautious.
    """
    then = {group.path: group for group in before.groups}
    own = next((group for group in after.groups if group.kills is not None), None)
    if own is not None and own.path in then:
        if not _rose(then[own.path].kills, own.kills):
            return None
        limited = [group for group in after.groups if group.limit is not None and group.path in then]
        hit = next((group for group in limited if _rose(then[group.path].hits, group.hits)), None)
        if hit is not None and hit.limit is not None:
            return f"the kernel's memory limit was hit (cgroup limit {format_bytes(hit.limit)})"
        reached = next((group for group in limited if group.reached), None)
        if reached is not None and reached.limit is not None:
            return f"the kernel's memory limit was reached (cgroup limit {format_bytes(reached.limit)})"
        if after.whole:
            return "the kernel killed a process because the machine had run out of memory"
        return (
            "the kernel killed a process for lack of memory, because of a limit above this container or because the "
            "machine had run out"
        )
    if _rose(before.machine_kills, after.machine_kills):
        return "the kernel killed a process of this machine for lack of memory at that time, most likely this one"
    return None


def _rose(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def read_counters(proc: Path) -> MemoryCounters:
    """Read the counters through `proc`, which is /proc; what cannot be read is left out."""
    groups = _read_v2(proc) or _read_v1(proc)
    return MemoryCounters(groups, read_cgroup_field(proc / "vmstat", "oom_kill"), _sees_all_groups(proc))


def _sees_all_groups(proc: Path) -> bool:
    try:
        return os.readlink(proc / "self" / "ns" / "cgroup") == _ALL_GROUPS
    except OSError:
        return False


def _read_v2(proc: Path) -> tuple[CgroupCounters, ...]:
    groups = []
    for group in cgroup_directories(proc, "cgroup2", ""):
        kills = read_cgroup_field(group / "memory.events", "oom_kill")
        if kills is None:
            continue  # The root of the hierarchy, or one that has no memory controller.
        # `oom` counts in the group whose limit was hit and in its ancestors: the nearest one that rose has the limit.
        hits = read_cgroup_field(group / "memory.events", "oom")
        groups.append(CgroupCounters(str(group), _limit(group / "memory.max"), kills, hits))
    return tuple(groups)


def _read_v1(proc: Path) -> tuple[CgroupCounters, ...]:
    # Version 1 counts kills only in the dying process's own group; `failcnt` rises in the group whose limit was hit.
    groups = []
    for group in cgroup_directories(proc, "cgroup", "memory"):
        if (group / "memory.oom_control").exists():
            kills = read_cgroup_field(group / "memory.oom_control", "oom_kill")
            for path, prefix in ((str(group), "memory."), (f"{group} with swap", "memory.memsw.")):
                # Memory with swap has a limit of its own. The kernel checks it first, so if both limits are equal, as
                # often in a container, only its counter rises.
                limit = _limit(group / f"{prefix}limit_in_bytes")
                hits = read_cgroup_number(group / f"{prefix}failcnt")
                most = read_cgroup_number(group / f"{prefix}max_usage_in_bytes")
                reached = limit is not None and most is not None and most >= limit - REACHED_WITHIN
                groups.append(CgroupCounters(path, limit, kills, hits, reached))
    return tuple(groups)


def _limit(path: Path) -> int | None:
    limit = read_cgroup_number(path)  # Version 2 writes `max` for no limit.
    return None if limit is None or limit >= _NO_LIMIT else limit
