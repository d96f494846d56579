"""How much memory checkpoints may take on this machine, and how much is free now."""

from __future__ import annotations

from pathlib import Path

from dlrover_run.devices.cgroups import cgroup_directories, read_cgroup_field, read_cgroup_number

DEFAULT_SHARE = 4
"""Without `--checkpoint-memory`, checkpoints take at most this part of the memory, the fourth."""

KEPT_FREE = 256 * 1024 * 1024
"""Bytes that stay free when room for a checkpoint is given: the workers allocate meanwhile."""

PROC = Path("/proc")


def default_limit(proc: Path = PROC) -> int:
    """The limit without a flag, in bytes: a part of the memory of the machine, or of the control group if that has
    less."""
    limits = [limit for limit, _ in _cgroup_memory(proc)]
    return min([_meminfo(proc, "MemTotal:"), *limits]) // DEFAULT_SHARE


def free_bytes(proc: Path = PROC) -> int:
    """The bytes that can be allocated now without ending a process of the job."""
    free = [limit - used for limit, used in _cgroup_memory(proc)]
    return max(0, min([_meminfo(proc, "MemAvailable:"), *free]) - KEPT_FREE)


def _meminfo(proc: Path, name: str) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        key, *fields = line.split()
        if key == name:
            return int(fields[0]) * 1024
    return 0


def _cgroup_memory(proc: Path) -> list[tuple[int, int]]:
    """The limit of each control group above this process that has one, and what it uses without caches that can be
    dropped."""
    found = []
    for directory in cgroup_directories(proc, "cgroup2", ""):
        limit, used = read_cgroup_number(directory / "memory.max"), read_cgroup_number(directory / "memory.current")
        if limit is not None and used is not None:
            found.append((limit, used - (read_cgroup_field(directory / "memory.stat", "inactive_file") or 0)))
    for directory in cgroup_directories(proc, "cgroup", "memory"):
        limit = read_cgroup_number(directory / "memory.limit_in_bytes")
        used = read_cgroup_number(directory / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            found.append((limit, used - (read_cgroup_field(directory / "memory.stat", "total_inactive_file") or 0)))
    return found
