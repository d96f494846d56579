"""Control groups of our own below the one that this launcher is in, a group for each task: version 2, else version 1.

Whether we may make one is found out by making one. Each group is named for its task and locked by whoever made it, so
that what a launcher left that was killed is told from what belongs to one that lives, in whatever pid namespace.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import select
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dlrover_run.failures.oom_kills import cgroup_directories, read_cgroup_number
from tf_ps_runner.memory import MIB
from tf_ps_runner.memory.process_tree import processes_of

PREFIX = "tf-ps-run."
"""How the names of all our groups begin."""

EMPTY_TIMEOUT = 1.0
"""Seconds that processes which are left in a group have to vanish once they were killed. After that the group stays,
and a later launcher removes it."""

MAX_TRIES = 20
"""How often a new group may be removed by others who clear up in the same moment."""

_OWN_LEAF = "launcher"


@dataclass(frozen=True)
class CgroupParent:
    """The folder in which groups can be made, and the version of what is mounted there."""

    folder: Path
    version: Literal[1, 2]


def find_cgroup_parent(proc: Path = Path("/proc")) -> CgroupParent | None:
    """Where groups that limit memory can be made; None where they cannot, or we may not.

    A group beside or above our own would do too, but would take the tasks out of limits that somebody has set for us.
    """
    for folder in cgroup_directories(proc, "cgroup2", "")[:1]:
        place = CgroupParent(folder, 2)
        if _hands_memory_down(place) and _works(place):
            return place
    for folder in cgroup_directories(proc, "cgroup", "memory")[:1]:
        place = CgroupParent(folder, 1)
        if _works(place):
            return place
    return None


def _works(place: CgroupParent) -> bool:
    try:
        TaskCgroup(place, "trial", 1).close()
    except OSError:
        return False
    return True


def _hands_memory_down(place: CgroupParent) -> bool:
    """Whether groups below can have limits, which version 2 does only for a group without processes in it. Where all
    of those are this launcher's, as in a scope that was delegated to it, they move into a group of their own."""
    try:
        if "memory" in _words(place.folder / "cgroup.subtree_control"):
            return True
        if "memory" not in _words(place.folder / "cgroup.controllers"):
            return False
        inside = {int(word) for word in _words(place.folder / "cgroup.procs")}
        if not inside <= _launcher():
            return False
        return _step_aside(place.folder, inside)
    except OSError:
        return False


def _step_aside(folder: Path, inside: set[int]) -> bool:
    leaf = folder / f"{PREFIX}{_OWN_LEAF}.{secrets.token_hex(4)}"
    os.mkdir(leaf)
    try:
        for pid in inside:
            _write(leaf / "cgroup.procs", str(pid))
        _write(folder / "cgroup.subtree_control", "+memory")
    except OSError:
        for pid in inside:
            with contextlib.suppress(OSError):
                _write(folder / "cgroup.procs", str(pid))
        os.rmdir(leaf)
        return False
    return True


def _launcher() -> set[int]:
    """The watchdog, this agent, and what they have started."""

    return set(processes_of(os.getppid()))


def remove_leftover_groups(place: CgroupParent) -> None:
    """Remove the empty groups of launchers that were killed."""
    with contextlib.suppress(OSError):
        for name in os.listdir(place.folder):
            if name.startswith(PREFIX) and (lock := _lock(place.folder / name)) is not None:
                # Nobody owns it. Where processes are in it, or groups, the kernel refuses.
                with contextlib.suppress(OSError):
                    os.rmdir(place.folder / name)
                os.close(lock)


class TaskCgroup:
    """The group of one task with a limit in MiB. Raises OSError when it cannot be made."""

    def __init__(self, place: CgroupParent, name: str, limit: int) -> None:
        self._version = place.version
        self.path, self._owned = _make(place.folder, name)
        try:
            self._limit(limit * MIB)
        except OSError:
            self.close()
            raise

    def _limit(self, size: int) -> None:
        if self._version == 2:
            _write(self.path / "memory.max", str(size))
            # All of the task dies, so that none is left half dead: a server without its child, say.
            _write(self.path / "memory.oom.group", "1")
            self._without_swap("memory.swap.max", 0)
        else:
            _write(self.path / "memory.limit_in_bytes", str(size))
            self._without_swap("memory.memsw.limit_in_bytes", size)

    def _without_swap(self, file: str, size: int) -> None:
        """Swap does not stretch the limit, where the kernel counts it at all."""
        with contextlib.suppress(FileNotFoundError):
            _write(self.path / file, str(size))

    def take(self, pid: int) -> None:
        """Put a process and all its threads into the group. Raises OSError."""
        _write(self.path / "cgroup.procs", str(pid))

    @property
    def kills(self) -> int | None:
        """How many processes of the group were killed for memory; None where that cannot be read."""
        return _field(self.path / ("memory.events" if self._version == 2 else "memory.oom_control"), "oom_kill")

    @property
    def usage(self) -> int:
        """MiB that the group uses and that the kernel could not take back at once, as it can cached files."""
        if self._version == 2:
            used, prefix = read_cgroup_number(self.path / "memory.current"), ""
        else:
            used, prefix = read_cgroup_number(self.path / "memory.usage_in_bytes"), "total_"
        stat = self.path / "memory.stat"
        cached = sum(_field(stat, f"{prefix}{name}_file") or 0 for name in ("active", "inactive"))
        return max(0, (used or 0) - cached) // MIB

    def close(self) -> None:
        """Remove the group; processes that are left in it are killed."""
        if not self._remove():
            self._empty()
            self._remove()
        if self._owned >= 0:
            os.close(self._owned)
            self._owned = -1

    def _remove(self) -> bool:
        try:
            os.rmdir(self.path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _empty(self) -> None:
        left = []
        with contextlib.suppress(OSError):
            for pid in map(int, _words(self.path / "cgroup.procs")):
                with contextlib.suppress(OSError):
                    left.append(os.pidfd_open(pid))
        for fd in left:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        for fd in left:
            ended = select.poll()
            ended.register(fd, select.POLLIN)
            ended.poll(EMPTY_TIMEOUT * 1000)
            os.close(fd)


def _make(folder: Path, name: str) -> tuple[Path, int]:
    """A new group, and the descriptor that holds its lock. Raises OSError."""
    for _ in range(MAX_TRIES):
        path = folder / f"{PREFIX}{name}.{secrets.token_hex(4)}"
        os.mkdir(path)
        # Another launcher that clears up may come in between, for which a group without a lock is one that was left.
        if (lock := _lock(path)) is not None:
            if path.exists():
                return path, lock
            os.close(lock)
    raise FileNotFoundError(errno.ENOENT, "others remove what is made there", str(folder))


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the lock of a group, None where another process does or there is no such group."""
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


def _write(file: Path, text: str) -> None:
    fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _words(file: Path) -> list[str]:
    return file.read_text().split()


def _field(file: Path, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return None
