"""The processors and the memory that this process and its children may use: those of the machine, as far as control
groups allow. The root of /proc is an argument."""

from __future__ import annotations

import os
from pathlib import Path

from dlrover_run.devices.cgroups import cgroup_directories, read_cgroup_field, read_cgroup_number

PROC = Path("/proc")


def usable_processors(proc: Path = PROC) -> float:
    """How many processors may be used at a time; a quota may allow a part of one."""
    shares = [float(len(os.sched_getaffinity(0)))]
    for folder in cgroup_directories(proc, "cgroup2", ""):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal():
            shares.append(int(quota) / int(period))
    for folder in cgroup_directories(proc, "cgroup", "cpu"):
        allowed, every = (read_cgroup_number(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if allowed and every:
            shares.append(allowed / every)
    return max(min(shares), 0.01)


def usable_memory(proc: Path = PROC) -> int:
    """Bytes of memory that may be used."""
    return min([_meminfo(proc, "MemTotal:"), *(limit for limit, _ in _cgroup_memory(proc))])


def available_memory(proc: Path = PROC) -> int:
    """Bytes of memory that can be allocated now without ending a process of the job."""
    return min([_meminfo(proc, "MemAvailable:"), *(limit - used for limit, used in _cgroup_memory(proc))])


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _meminfo(proc: Path, name: str) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        key, *fields = line.split()
        if key == name:
            return int(fields[0]) * 1024
    return 0


def _cgroup_memory(proc: Path) -> list[tuple[int, int]]:
    """The limit of each control group above this process that has one, and what it uses without caches that can be
    dropped."""
    files = [
        (directory, "memory.max", "memory.current", "inactive_file")
        for directory in cgroup_directories(proc, "cgroup2", "")
    ]
    files += [
        (directory, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        for directory in cgroup_directories(proc, "cgroup", "memory")
    ]
    found = []
    for directory, limit_file, used_file, cached in files:
        if limit := read_cgroup_number(directory / limit_file):
            used = read_cgroup_number(directory / used_file) or 0
            found.append((limit, used - (read_cgroup_field(directory / "memory.stat", cached) or 0)))
    return found
