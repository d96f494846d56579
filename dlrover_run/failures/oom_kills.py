"""Whether the kernel's out-of-memory killer ended a worker, from the counters of the control groups.

A process killed for lack of memory dies of SIGKILL like any other. But the kernel counts such kills for each control
group, so a count that has risen since the workers started is proof. The counters are read when a round starts and after
a SIGKILL; nothing runs in between.

`agent.worker_round` asks for a worker, and `tf_ps_runner.memory.enforcer` for a task that has no control group of its
own. The answer is `WorkerExit.oom_kill`, which everything later reads: `failures.causes` for texts and causes, and
`tf_ps_runner.agent.exits` for what the end costs. Its exit code is that of any SIGKILL, 137.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from dlrover_run.coordination.text import format_bytes
from dlrover_run.devices.cgroups import cgroup_directories, read_cgroup_field, read_cgroup_number

_NO_LIMIT = 1 << 60
"""cgroup v1 has a number about as large as the address space for no limit."""


class CgroupCounters(msgspec.Struct, frozen=True):
    """One control group: its limit in bytes (None: no limit), how many of its processes were killed for lack of memory,
    and how often its own limit was hit. `kills` and `hits` are None if unknown."""

    path: str
    limit: int | None
    kills: int | None
    hits: int | None


class MemoryCounters(msgspec.Struct, frozen=True):
    """This process's control group and its ancestors, nearest first, and the out-of-memory kills of the machine."""

    groups: tuple[CgroupCounters, ...]
    machine_kills: int | None


class OomKillCounters:
    """The counters at the start of a round, to compare with those after a worker's death."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._before = read_counters(proc)

    def explain(self) -> str | None:
        """A clause on out-of-memory kills since the start, such as `the kernel's memory limit was hit (cgroup limit 512
        MiB)`, or None."""
        return explain_oom_kill(self._before, read_counters(self._proc))


def explain_oom_kill(before: MemoryCounters, after: MemoryCounters) -> str | None:
    """A clause on a process of this control group that died of SIGKILL between the two readings, or None.

    The group's own count of kills decides. The limit is that of the nearest group with a limit whose own count rose; if
    none rose, the machine had run out of memory. If the group's counters cannot be read, a kill anywhere on the machine
    is weaker evidence, and the text is as cautious.
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
        return "the kernel killed a process because the machine had run out of memory"
    if _rose(before.machine_kills, after.machine_kills):
        return "the kernel killed a process of this machine for lack of memory at that time, most likely this one"
    return None


def _rose(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def read_counters(proc: Path) -> MemoryCounters:
    """Read the counters through `proc`, which is /proc; what cannot be read is left out."""
    groups = _read_v2(proc) or _read_v1(proc)
    return MemoryCounters(groups, read_cgroup_field(proc / "vmstat", "oom_kill"))


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
                groups.append(CgroupCounters(path, limit, kills, read_cgroup_number(group / f"{prefix}failcnt")))
    return tuple(groups)


def _limit(path: Path) -> int | None:
    limit = read_cgroup_number(path)  # Version 2 writes `max` for no limit.
    return None if limit is None or limit >= _NO_LIMIT else limit
