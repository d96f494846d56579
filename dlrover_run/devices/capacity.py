"""The processors and the memory that this process and its children may use: those of the machine, as far as control
groups allow. The file system roots are arguments."""

from __future__ import annotations

import os
from pathlib import Path

from dlrover_run.devices.cgroups import cgroup_directories, read_cgroup_number

MIB = 1 << 20


def usable_processors(proc: Path = Path("/proc")) -> float:
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


def usable_memory(proc: Path = Path("/proc")) -> int:
    """MiB of memory that may be used."""
    groups = [folder / "memory.max" for folder in cgroup_directories(proc, "cgroup2", "")]
    groups += [folder / "memory.limit_in_bytes" for folder in cgroup_directories(proc, "cgroup", "memory")]
    limits = [limit // MIB for file in groups if (limit := read_cgroup_number(file))]
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MIB
    return min([machine, *limits])


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
