"""Control groups below the launcher's own, one for each task: version 2, else version 1.

Whether the launcher may create one is found out by trying. Each group is named for its task and locked by its launcher,
so that the groups of a killed launcher can be distinguished from those of a living one, in whatever pid namespace.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dlrover_run import linux
from dlrover_run.devices.cgroups import cgroup_directories, read_cgroup_field, read_cgroup_number
from dlrover_run.processes import tree
from tf_ps_runner.memory import MIB

PREFIX = "tf-ps-run."
"""How the names of all these groups begin."""

EMPTY_TIMEOUT = 1.0
"""Seconds for the killed processes of a group to vanish. After that the group stays, and a later launcher removes
it."""

MAX_TRIES = 20
"""How often a new group may be removed by other launchers that clean up at the same moment."""


@dataclass(frozen=True)
class CgroupParent:
    """The folder in which groups can be created, and the version of what is mounted there."""

    folder: Path
    version: Literal[1, 2]


def find_cgroup_parent(proc: Path = Path("/proc")) -> CgroupParent | None:
    """Where groups that limit memory can be created; None if that is impossible or not permitted.

    A group beside or above the launcher's own would do too, but would take the tasks out of limits that are set for
    the job.
    """
    for folder in cgroup_directories(proc, "cgroup2", "")[:1]:
        if _delegate_memory(folder) and _works(parent := CgroupParent(folder, 2)):
            return parent
    for folder in cgroup_directories(proc, "cgroup", "memory")[:1]:
        if _works(parent := CgroupParent(folder, 1)):
            return parent
    return None


def _works(parent: CgroupParent) -> bool:
    try:
        TaskCgroup(parent, "trial", 1).close()
    except OSError:
        return False
    return True


def _delegate_memory(folder: Path) -> bool:
    """Whether groups below can have limits, which version 2 allows only below a group without processes. If all of
    those are this launcher's, as in a scope that was delegated to it, they are moved into a group of their own."""
    try:
        if "memory" in (folder / "cgroup.subtree_control").read_text().split():
            return True
        if "memory" not in (folder / "cgroup.controllers").read_text().split():
            return False
        inside = _pids(folder)
        # The watchdog, this agent, and what they have started.
        if not inside <= set(tree.below(os.getppid())):
            return False
        own = folder / f"{PREFIX}launcher.{secrets.token_hex(4)}"
        os.mkdir(own)
        try:
            for pid in inside:
                _write(own / "cgroup.procs", str(pid))
            _write(folder / "cgroup.subtree_control", "+memory")
        except OSError:
            for pid in inside:
                with contextlib.suppress(OSError):
                    _write(folder / "cgroup.procs", str(pid))
            os.rmdir(own)
            return False
    except OSError:
        return False
    return True


def remove_leftover_groups(parent: CgroupParent) -> None:
    """Remove the empty groups of launchers that were killed."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent.folder):
            if name.startswith(PREFIX) and (lock := _lock(parent.folder / name)) is not None:
                # No launcher owns it. If processes are in it, or groups, the kernel refuses.
                with contextlib.suppress(OSError):
                    os.rmdir(parent.folder / name)
                os.close(lock)


class TaskCgroup:
    """The group of one task with a limit in MiB. Raises OSError when it cannot be created."""

    def __init__(self, parent: CgroupParent, task_name: str, limit_mib: int) -> None:
        self._version = parent.version
        self.path, self._lock = _create(parent.folder, task_name)
        try:
            self._limit(limit_mib * MIB)
        except OSError:
            self.close()
            raise

    def _limit(self, size: int) -> None:
        if self._version == 2:
            _write(self.path / "memory.max", str(size))
            # All processes are killed together, so that none is left half dead, such as a server without its child.
            _write(self.path / "memory.oom.group", "1")
            swap, swap_size = "memory.swap.max", 0
        else:
            _write(self.path / "memory.limit_in_bytes", str(size))
            swap, swap_size = "memory.memsw.limit_in_bytes", size
        # Swap must not extend the limit, if the kernel accounts for it at all.
        with contextlib.suppress(FileNotFoundError):
            _write(self.path / swap, str(swap_size))

    def add(self, pid: int) -> None:
        """Put a process and all its threads into the group. Raises OSError."""
        _write(self.path / "cgroup.procs", str(pid))

    @property
    def kills(self) -> int | None:
        """How many processes of the group were killed for memory, be it for an outer limit or for that of the machine;
        None if that cannot be read."""
        file = "memory.events" if self._version == 2 else "memory.oom_control"
        return read_cgroup_field(self.path / file, "oom_kill")

    @property
    def hits(self) -> int | None:
        """How often the kernel looked for a process to kill because of the group's own limit; None if that is unknown,
        as in version 1."""
        return read_cgroup_field(self.path / "memory.events", "oom") if self._version == 2 else None

    @property
    def usage(self) -> int:
        """MiB that the group uses, without what the kernel could reclaim at once, such as cached files."""
        file, prefix = ("memory.current", "") if self._version == 2 else ("memory.usage_in_bytes", "total_")
        used = read_cgroup_number(self.path / file)
        stat = self.path / "memory.stat"
        cached = sum(read_cgroup_field(stat, f"{prefix}{name}_file") or 0 for name in ("active", "inactive"))
        return max(0, (used or 0) - cached) // MIB

    def close(self) -> None:
        """Remove the group; processes that are left in it are killed."""
        if not self._remove():
            self._kill_all()
            self._remove()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _remove(self) -> bool:
        try:
            os.rmdir(self.path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _kill_all(self) -> None:
        if not linux.has_pidfd():
            self._kill_by_pid()
            return
        processes = []
        with contextlib.suppress(OSError):
            for pid in _pids(self.path):
                with contextlib.suppress(OSError):
                    processes.append(linux.pidfd_open(pid))
        for process in processes:
            with contextlib.suppress(OSError):
                linux.pidfd_send_signal(process, signal.SIGKILL)
        for process in processes:
            ended = select.poll()
            ended.register(process, select.POLLIN)
            ended.poll(EMPTY_TIMEOUT * 1000)
            os.close(process)

    def _kill_by_pid(self) -> None:
        """The same without pidfds: between two looks a pid of the group may be reused only by chance."""
        deadline = time.monotonic() + EMPTY_TIMEOUT
        with contextlib.suppress(OSError):
            while (pids := _pids(self.path)) and time.monotonic() < deadline:
                for pid in pids:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(tree.LOOK_INTERVAL)


def _create(folder: Path, name: str) -> tuple[Path, int]:
    """A new group, and the descriptor that holds its lock. Raises OSError."""
    for _ in range(MAX_TRIES):
        path = folder / f"{PREFIX}{name}.{secrets.token_hex(4)}"
        os.mkdir(path)
        # Another launcher that cleans up may come in between: it takes a group without a lock for a leftover.
        if (lock := _lock(path)) is not None:
            if path.exists():
                return path, lock
            os.close(lock)
    raise FileNotFoundError(errno.ENOENT, "other launchers remove the groups that are created there", str(folder))


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the lock of a group; None if another process holds it or there is no such group."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _pids(group: Path) -> set[int]:
    return {int(pid) for pid in (group / "cgroup.procs").read_text().split()}


def _write(file: Path, text: str) -> None:
    fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
