"""Problems of this machine that are known before its devices are tried: GPUs, shared memory, disk, open files,
processes.

Nothing is started, no device is used, and nothing is waited for. Limits other than those of the GPUs are never severe:
only the training script knows how much of them it needs. (psutil has neither inodes nor the limits of control groups.)
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dlrover_run.background import begin_in_thread
from dlrover_run.devices import NodeProblem
from dlrover_run.devices.cgroups import cgroup_directories, read_cgroup_number
from dlrover_run.devices.count import Nvml
from dlrover_run.devices.disks import DiskSpace, disk_space
from dlrover_run.features.node_check.node.gpus import find_gpu_problems
from dlrover_run.spec import JobSpec
from dlrover_run.words.text import format_bytes

MIB = 1 << 20

SHM_PER_WORKER = 256 * MIB
"""Minimum bytes free in /dev/shm per worker. Torch's data loaders pass each batch through it: 64 images of 224 x 224
are 37 MiB, and each loader process keeps two batches ready. NCCL uses some MiB per GPU besides. Containers have 64 MiB
by default, and a worker that finds no more dies of SIGBUS without a message."""

MIN_DISK_BYTES = 1024 * MIB
"""Minimum bytes free for logs and temporary files: workers write logs for days, and kernel compilers (inductor, triton)
put hundreds of MiB into the directory for temporary files."""

MIN_INODES = 1000
"""Minimum inodes free there: a compiler's cache alone uses that many."""

MIN_OPEN_FILES = 1024
"""Minimum limit of open files per process. 1024 is the default of Linux, so a lower limit was set on purpose; a worker
with 64 peers and 16 loaders, whose batches use a descriptor per tensor, needs several hundred."""

PIDS_PER_WORKER = 128
"""Minimum processes and threads per worker that the control group still allows. A worker with torch has a few dozen
threads (thread pools, NCCL, memory pinning), and each of its loaders is a process with threads of its own."""


@dataclass(frozen=True)
class LimitSources:
    """Where the limits are read; tests pass others. `limit` is the soft limit of open files, None for no limit."""

    statvfs: Callable[[str], os.statvfs_result] = os.statvfs
    limit: Callable[[], int | None] = lambda: _open_files_limit()
    proc: Path = Path("/proc")


async def severe_node_problems(spec: JobSpec, warn: Callable[[str], None]) -> tuple[str, ...]:
    """The problems that make this machine unfit, one sentence each; `warn` prints the problems that may be harmless."""
    # A driver may take seconds to answer, and a broken one never answers: the agent does not join this thread.
    found, _ = begin_in_thread(
        lambda: find_node_problems(spec.workers_per_node, spec.logs.log_dir, os.environ, spec.gpu_each), "health"
    )
    try:
        problems = await found
    except Exception as error:
        # For example an old pynvml that lacks a function. The devices are tested all the same.
        problems = (NodeProblem(f"the look at this machine failed: {type(error).__name__}: {error}"),)
    for problem in problems:
        if not problem.severe:
            warn(f"warning: {problem.text}")
    return tuple(problem.text for problem in problems if problem.severe)


def find_node_problems(
    workers: int,
    log_dir: str | None,
    environ: Mapping[str, str],
    gpu_each: bool = False,
    nvml: Nvml = None,
    dev: Path = Path("/dev"),
) -> tuple[NodeProblem, ...]:
    """The problems of this machine for that many workers, severe ones first; empty for a healthy machine.

    `environ` is that of the workers. `gpu_each`: the user requested a GPU for each worker; without it, too few GPUs are
    severe only if CUDA_VISIBLE_DEVICES names more. With an NVIDIA driver this can take seconds, if persistence mode is
    off and the GPUs have to wake up, so an event loop calls it in a thread. Raises nothing.
    """
    gpus = find_gpu_problems(workers, environ, gpu_each, nvml, dev)
    limits = find_limit_problems(workers, log_dir, environ, dev)
    return tuple(sorted((*gpus, *limits), key=lambda problem: not problem.severe))


def find_limit_problems(
    workers: int,
    log_dir: str | None,
    environ: Mapping[str, str],
    dev: Path = Path("/dev"),
    machine: LimitSources | None = None,
) -> Iterator[NodeProblem]:
    """The limits of this machine that are too low for that many workers with the environment `environ`."""
    machine = machine or LimitSources()
    yield from _shared_memory(workers, dev / "shm", machine)
    yield from _disks(log_dir, environ.get("TMPDIR") or "/tmp", machine)
    limit = machine.limit()
    if limit is not None and limit < MIN_OPEN_FILES:
        yield NodeProblem(
            f"a process may have {limit} files open: data loaders and many ranks need more than {MIN_OPEN_FILES}; "
            "raise it with `ulimit -n 65536` (Docker: --ulimit nofile=65536)"
        )
    yield from _processes(workers, machine)


def _shared_memory(workers: int, place: Path, machine: LimitSources) -> Iterator[NodeProblem]:
    try:
        space = disk_space(machine.statvfs(str(place)))
    except OSError as error:
        yield NodeProblem(
            f"{place} cannot be used ({error.strerror}): data loaders with workers and NCCL need it; "
            "mount a tmpfs there, or start the container with --shm-size=8g"
        )
        return
    wanted = workers * SHM_PER_WORKER
    if space.size < wanted:
        remedy = "start the container with --shm-size=8g (Kubernetes: an emptyDir with medium: Memory)"
    else:
        remedy = "remove the files of ended programs (`ls -l` lists them)"
    if space.free < wanted:
        yield NodeProblem(
            f"{place} has {format_bytes(space.free)} free of {format_bytes(space.size)}: data loaders with workers "
            f"need more, about {format_bytes(SHM_PER_WORKER)} in each worker of the job; {remedy}"
        )


def _disks(log_dir: str | None, temporary: str, machine: LimitSources) -> Iterator[NodeProblem]:
    """The file systems of logs and of temporary files, once if they are the same."""
    seen: set[tuple[int, int]] = set()
    for what, wanted in (("logs go there", log_dir), ("temporary files go there", temporary)):
        if wanted is None:
            continue
        path = Path(os.path.abspath(wanted))
        # The directory, or its nearest existing ancestor, in which it will be created.
        place = next((here for here in (path, *path.parents) if os.path.exists(here)), Path("/"))
        try:
            space, device = machine.statvfs(str(place)), os.stat(place).st_dev
        except OSError as error:
            yield NodeProblem(
                f"{place} cannot be used ({error.strerror}), and {what}: repair it or choose another directory"
            )
            continue
        name = (device, space.f_fsid)
        if name not in seen:
            seen.add(name)
            yield from _disk(place, what, disk_space(space))


def _disk(place: Path, what: str, space: DiskSpace) -> Iterator[NodeProblem]:
    if space.is_read_only:
        yield NodeProblem(f"{place} is mounted read-only, and {what}: choose another directory (--log-dir, TMPDIR)")
    elif space.free < MIN_DISK_BYTES:
        yield NodeProblem(
            f"the disk of {place} has {format_bytes(space.free)} free of {format_bytes(space.size)}, and {what}: "
            "make room, or choose another directory (--log-dir, TMPDIR)"
        )
    elif space.free_files is not None and space.free_files < MIN_INODES:
        yield NodeProblem(
            f"the disk of {place} has room for {space.free_files} more files of {space.files}, and {what}: "
            "remove small files, or choose another directory (--log-dir, TMPDIR)"
        )


def _processes(workers: int, machine: LimitSources) -> Iterator[NodeProblem]:
    """The group with the fewest processes left: this process's own, or an ancestor."""
    counts = []
    for kind, controller in (("cgroup2", ""), ("cgroup", "pids")):
        for group in cgroup_directories(machine.proc, kind, controller):
            used, limit = read_cgroup_number(group / "pids.current"), read_cgroup_number(group / "pids.max")
            if used is not None and limit is not None:
                counts.append((limit - used, used, limit))
    if counts and min(counts)[0] < workers * PIDS_PER_WORKER:
        _, used, limit = min(counts)
        yield NodeProblem(
            f"the control group may have {limit} processes and threads and has {used}: {workers} "
            f"{'worker needs' if workers == 1 else 'workers need'} about {workers * PIDS_PER_WORKER} more; "
            "raise it (Docker: --pids-limit, systemd: TasksMax, Kubernetes: podPidsLimit)"
        )


def _open_files_limit() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft
