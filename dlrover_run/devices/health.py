"""What a machine has left for the workers beside its devices: shared memory, disk, open files and processes.

Nothing here is severe: who needs much of it is known only to the training script.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dlrover_run.devices import NodeProblem
from dlrover_run.devices.gpu_health import HealthNvml, find_gpu_problems
from dlrover_run.failures.oom_kills import cgroup_directories, format_bytes, read_cgroup_number

MIB = 1 << 20

SHM_PER_WORKER = 256 * MIB
"""Bytes free in /dev/shm for each worker, below which it is told. The data loaders of torch hand each batch over there:
64 images of 224 x 224 are 37 MiB, and each loader process keeps two batches ready. NCCL takes some MiB for each GPU
besides. Containers are born with 64 MiB for all, and a worker that finds no more dies of SIGBUS without a word."""

MIN_DISK_BYTES = 1024 * MIB
"""Bytes free where logs and temporary files go, below which it is told: workers write logs for days, and compilers of
kernels (inductor, triton) put hundreds of MiB into the folder for temporary files."""

MIN_INODES = 1000
"""Files that can still be made there, below which it is told: a compiler's cache alone makes that many."""

MIN_OPEN_FILES = 1024
"""Open files for each process, below which it is told. 1024 is what Linux gives, so whoever has less was given less; a
worker with 64 ranks to talk to and 16 loaders, whose batches are a descriptor a tensor, needs several hundred."""

PIDS_PER_WORKER = 128
"""Processes and threads that the control group has room for, for each worker, below which it is told. A worker with
torch has a few dozen threads (its pools, NCCL, the pinning of memory), and each of its loaders is a process with
threads of its own."""


@dataclass(frozen=True)
class LimitSources:
    """Where this look is taken; a test gives another place. `limit` is the soft limit of open files, None for none."""

    statvfs: Callable[[str], os.statvfs_result] = os.statvfs
    limit: Callable[[], int | None] = lambda: _soft_limit(resource.RLIMIT_NOFILE)
    proc: Path = Path("/proc")


def find_node_problems(
    workers: int,
    log_dir: str | None,
    environ: Mapping[str, str],
    gpu_each: bool = False,
    nvml: HealthNvml | None = None,
    dev: Path = Path("/dev"),
) -> tuple[NodeProblem, ...]:
    """What ails this machine as the place of that many workers, the severe first; empty for a healthy one.

    `environ` is that of the workers. `gpu_each` says that the person who started the job has asked for a GPU for each
    worker; without it, few GPUs are a fault only where CUDA_VISIBLE_DEVICES names more. It takes some milliseconds on
    a machine without an NVIDIA driver; with one NVML's own start is added, which is seconds where the driver is
    in no persistence mode and has to wake its GPUs, so whoever runs a loop asks in a thread. Raises nothing.
    """
    found = [
        *find_gpu_problems(workers, environ, gpu_each, nvml, dev),
        *find_limit_problems(workers, log_dir, environ, dev),
    ]
    return tuple(sorted(found, key=lambda ailment: not ailment.severe))


def find_limit_problems(
    workers: int,
    log_dir: str | None,
    environ: Mapping[str, str],
    dev: Path = Path("/dev"),
    machine: LimitSources | None = None,
) -> Iterator[NodeProblem]:
    """What is short on this machine for that many workers, whose environment is `environ`."""
    machine = machine or LimitSources()
    yield from _shared_memory(workers, dev / "shm", machine)
    yield from _disks(log_dir, environ.get("TMPDIR") or "/tmp", machine)
    yield from _open_files(machine)
    yield from _processes(workers, machine)


def _shared_memory(workers: int, place: Path, machine: LimitSources) -> Iterator[NodeProblem]:
    try:
        space = machine.statvfs(str(place))
    except OSError as error:
        yield NodeProblem(
            f"{place} cannot be used ({error.strerror}): data loaders with workers and NCCL need it; "
            "mount a tmpfs there, or start the container with --shm-size=8g"
        )
        return
    free, whole = _free_bytes(space), _all_bytes(space)
    wanted = workers * SHM_PER_WORKER
    if free >= wanted:
        return
    if whole < wanted:
        remedy = "start the container with --shm-size=8g (Kubernetes: an emptyDir with medium: Memory)"
    else:
        remedy = "remove what ended programs have left there (`ls -l` shows it)"
    yield NodeProblem(
        f"{place} has {format_bytes(free)} free of {format_bytes(whole)}: data loaders with workers need more, about "
        f"{format_bytes(SHM_PER_WORKER)} in each worker of the job; {remedy}"
    )


def _disks(log_dir: str | None, temporary: str, machine: LimitSources) -> Iterator[NodeProblem]:
    """The file systems of the logs and of temporary files, each once where they are the same."""
    seen: set[tuple[int, int]] = set()
    for what, wanted in (("logs go there", log_dir), ("temporary files go there", temporary)):
        if wanted is None:
            continue
        place = _existing(wanted)
        try:
            space, device = machine.statvfs(str(place)), os.stat(place).st_dev
        except OSError as error:
            yield NodeProblem(
                f"{place} cannot be used ({error.strerror}), and {what}: mend it or choose another folder"
            )
            continue
        name = (device, space.f_fsid)
        if name not in seen:
            seen.add(name)
            yield from _disk(place, what, space)


def _disk(place: Path, what: str, space: os.statvfs_result) -> Iterator[NodeProblem]:
    free = _free_bytes(space)
    if space.f_flag & os.ST_RDONLY:
        yield NodeProblem(f"{place} is mounted read-only, and {what}: choose another folder (--log-dir, TMPDIR)")
    elif free < MIN_DISK_BYTES:
        yield NodeProblem(
            f"the disk of {place} has {format_bytes(free)} free of {format_bytes(_all_bytes(space))}, and {what}: "
            "make room, or choose another folder (--log-dir, TMPDIR)"
        )
    # A file system that makes inodes as they are needed, such as btrfs, counts none.
    elif space.f_files and space.f_favail < MIN_INODES:
        yield NodeProblem(
            f"the disk of {place} has room for {space.f_favail} more files of {space.f_files}, and {what}: "
            "remove small files, or choose another folder (--log-dir, TMPDIR)"
        )


def _existing(wanted: str) -> Path:
    """The folder, or the nearest one above it that is there: it will be made in that one."""
    place = Path(os.path.abspath(wanted))
    return next((here for here in (place, *place.parents) if os.path.exists(here)), Path("/"))


def _open_files(machine: LimitSources) -> Iterator[NodeProblem]:
    limit = machine.limit()
    if limit is not None and limit < MIN_OPEN_FILES:
        yield NodeProblem(
            f"a process may have {limit} files open: data loaders and many ranks need more than {MIN_OPEN_FILES}; "
            "raise it with `ulimit -n 65536` (Docker: --ulimit nofile=65536)"
        )


def _processes(workers: int, machine: LimitSources) -> Iterator[NodeProblem]:
    left = min(_rooms(machine.proc), key=lambda room: room[1] - room[0], default=None)
    if left is None:
        return
    used, limit = left
    if limit - used < workers * PIDS_PER_WORKER:
        yield NodeProblem(
            f"the control group may have {limit} processes and threads and has {used}: {workers} "
            f"{'worker needs' if workers == 1 else 'workers need'} about {workers * PIDS_PER_WORKER} more; "
            "raise it (Docker: --pids-limit, systemd: TasksMax, Kubernetes: podPidsLimit)"
        )


def _rooms(proc: Path) -> Iterator[tuple[int, int]]:
    """For this process's control group and those above it: how many processes and threads it has, and may have."""
    for group in [*cgroup_directories(proc, "cgroup2", ""), *cgroup_directories(proc, "cgroup", "pids")]:
        used, limit = read_cgroup_number(group / "pids.current"), read_cgroup_number(group / "pids.max")
        if used is not None and limit is not None:
            yield used, limit


def _soft_limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _free_bytes(space: os.statvfs_result) -> int:
    return space.f_bavail * space.f_frsize


def _all_bytes(space: os.statvfs_result) -> int:
    return space.f_blocks * space.f_frsize
