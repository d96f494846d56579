"""The processes below this one: which process inherits orphans, how they are listed, reaped and ended.

The kernel gives two tools. A *child subreaper* inherits every orphan among its descendants, so a daemon that a worker
left behind becomes a child of the launcher instead of process 1. A *parent death signal* ends a child when its parent
dies, also by SIGKILL. The watchdog and the agent are both subreapers and watch each other; a worker has the death
signal.

One kind of process is excluded from every list and every kill: a master, which other nodes need after the launcher
that started it has ended. It has the name MASTER_NAME and leads a session, and it ends itself with its last node.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from dlrover_run import linux

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Loaded once: a child between fork and exec must not load libraries.
_libc = ctypes.CDLL(None, use_errno=True)

MASTER_NAME = "dlrover-master"
"""The process name of a master. The watchdog recognizes a master by it, because it does not know which processes its
agent started."""

ORPHAN_GRACE = 0.4
"""Seconds from the end of a worker to the kill of the processes that it left behind.

Many of them notice the end of the worker and end too, such as the data loaders of torch.
"""

CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
"""Words in the command lines of Python's resource tracker and torch's shared-memory manager. They remove from /dev/shm
what a worker left there, and end by themselves, once the worker and all its children that share their pipe or socket
have ended: killed together with those children, they would leave the segments for ever."""

CLEANUP_TIMEOUT = 2.0
"""Seconds from the end of a worker to the kill of those that clean up after it, once the others have ended."""

END_TIMEOUT = 5.0
"""Seconds after which `end_children` gives up on processes that the kernel does not end (uninterruptible sleep)."""

LOOK_INTERVAL = 0.01
"""Seconds between two looks at a child that is being ended, where the kernel gives no pidfds."""


MAX_NAMED = 5
"""Processes that `describe_refused` names."""


def become_subreaper() -> None:
    """Make this process inherit the orphans among its descendants. Called by the watchdog, the agent and the supervisor
    of local nodes, before their first fork. Raises OSError on kernels before 3.4."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies. `parent` is the pid expected; if it has died already,
    exit.

    Runs in a child right after fork. The signal is bound to the thread that forked: the main thread, which lives as
    long as its process.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def continue_without_parent() -> None:
    """Have the kernel continue this process, should it be stopped, when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def open_standard_streams() -> None:
    """Open /dev/null as descriptor 0, 1 or 2 if it is closed. Otherwise the next file or connection that is opened
    becomes a standard stream. Called first in a launcher and in a master."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            # Python's descriptors are closed in a child, but workers inherit this one.
            os.set_inheritable(fd, True)
            setattr(sys, name, open(fd, "r" if fd == 0 else "w", closefd=False))  # noqa: SIM115 -- it stays open.


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


class ProcessInfo(msgspec.Struct, frozen=True):
    """A process below this one. `started` (clock ticks since boot) tells two processes with one pid apart."""

    pid: int
    parent: int
    session: int
    started: int


def children() -> set[int]:
    """The pids of this process's children, adopted orphans and zombies included, masters not."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        # There are none, as at the end of nearly every job, and /proc need not be read to know it.
        return set()
    here = os.getpid()
    return {each.pid for each in _processes() if each.parent == here and (each.pid, each.started) not in _earlier}


_earlier: frozenset[tuple[int, int]] = frozenset()


def spare_earlier_children() -> None:
    """Have `children` leave out the processes that are below this one now. For a launcher before it starts its first
    process: a shell that has begun others in the background may become the launcher by `exec`."""
    global _earlier
    _earlier = frozenset((each.pid, each.started) for each in descendants())


def descendants(spared: Iterable[int] = ()) -> list[ProcessInfo]:
    """All processes below this one, except masters, the `spared` children and what is below those."""
    kept = set(spared)
    # Usually there are none. The kernel's list may miss a child while another one ends; the next call finds it. Reading
    # it first saves reading every process of a large machine.
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as nearest:
        if {int(pid) for pid in nearest.read().split()} <= kept:
            return []
    return _below([os.getpid()], [process for process in _processes() if process.pid not in kept])


def ancestors(limit: int) -> list[int]:
    """The pids of this process's ancestors, the nearest first, at most `limit`."""
    found = [os.getppid()]
    with contextlib.suppress(OSError):
        while found[-1] > 1 and len(found) < limit:
            found.append(int(read_stat(found[-1])[1][1]))
    return found


_forked_at = 0.0


def _note_fork() -> None:
    global _forked_at
    _forked_at = time.monotonic()


os.register_at_fork(after_in_parent=_note_fork)


def start_of(pid: int, after: float = 0.0) -> float | None:
    """When a process began, on this host's monotonic clock; None for one that has been reaped. `after` is a time at
    which the caller was about to have it started: if this process has forked since, it was then.

    Else it is the middle of the time in which it can have been: the kernel shows it rounded down to a tick, 10 ms.
    """
    try:
        ticks = int(read_stat(pid)[1][19])
    except OSError:
        return None
    if 0 < after <= _forked_at:
        return _forked_at
    tick = 1 / os.sysconf("SC_CLK_TCK")
    # The kernel's clock of processes, unlike the monotonic one, goes on while the machine is suspended.
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks * tick
    now = time.monotonic()
    earliest = max(after, now - max(0.0, age))
    return (earliest + max(earliest, min(now, now - age + tick))) / 2


def kill(processes: Iterable[ProcessInfo], spared: Iterable[int]) -> list[int]:
    """Kill those of `processes` that still run below this process, and their descendants, except those that clean up
    after them. Returns the pids of those that this user may not end."""
    here = descendants(spared)
    # A pid that was reused in the meantime has another start time; a parent may have changed.
    lives = {(process.pid, process.started) for process in processes}
    still = [process for process in here if (process.pid, process.started) in lives]
    meant = {process.pid for process in [*still, *_below([process.pid for process in still], here)]}
    return [pid for pid in meant if not _cleans_up(pid) and not send_signal(pid, signal.SIGKILL)]


def send_signal(pid: int, number: int) -> bool:
    """Send a signal, also to a process that has ended; False if this user may not: `sudo` or a set-uid program has
    given it to another one."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return True


def _cleans_up(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        command = file.read()
        return any(cleaner in command for cleaner in CLEANERS)
    return False


def _below(roots: Iterable[int], processes: Iterable[ProcessInfo]) -> list[ProcessInfo]:
    by_parent: dict[int, list[ProcessInfo]] = {}
    for process in processes:
        by_parent.setdefault(process.parent, []).append(process)
    found: list[ProcessInfo] = []
    parents = list(roots)
    while parents:
        nearer = by_parent.pop(parents.pop(), [])
        found += nearer
        parents += [process.pid for process in nearer]
    return found


def _processes() -> list[ProcessInfo]:
    """Every process that /proc shows, and the children of this one that it hides, except masters; none where /proc
    belongs to another pid namespace or cannot be read (see `explain_unlisted`).

    Not psutil: it has no sessions, and shows no hidden children (see docs/design-notes.md)."""
    found: list[ProcessInfo] = []
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return found
        names = os.listdir("/proc")
    except OSError:
        # The kernel's list of our own children may still be there.
        names = [str(pid) for pid in children_of(os.getpid())]
    for name in names:
        if name.isdigit():
            with contextlib.suppress(OSError):
                title, fields = read_stat(int(name))
                relative = ProcessInfo(int(name), int(fields[1]), int(fields[3]), int(fields[19]))
                if relative.session != relative.pid or title != MASTER_NAME.encode():
                    found.append(relative)
    return found + _hidden_children()


def _hidden_children() -> list[ProcessInfo]:
    """The children of this process of which /proc shows no more than the pid. An option of the mount, hidepid=2, hides
    each process whose memory this user may not read, such as one that protects its keys (ssh-agent)."""
    here = os.getpid()
    found = [ProcessInfo(pid, here, 0, 0) for pid in children_of(here) if not _is_shown(pid)]
    # A master among them could not be distinguished from an orphan.
    return found if not found or _is_shown(here) else []


def _is_shown(pid: int) -> bool:
    try:
        read_stat(pid)
    except OSError:
        return False
    return True


def explain_unlisted() -> str:
    """Why this process cannot list the processes below it, a line for the user; empty where it can."""
    try:
        if os.readlink("/proc/self") == str(os.getpid()) and os.access("/proc", os.R_OK):
            read_stat(os.getpid())
            return ""
        why = "it shows another pid namespace, or may not be listed"
    except OSError as error:
        why = error.strerror or str(error)
    return (
        f"/proc cannot be used ({why}): processes that workers leave behind are not found and run on. Mount proc at "
        "/proc"
    )


def read_stat(pid: int, proc: str | Path = "/proc") -> tuple[bytes, list[bytes]]:
    """The name of a process and the fields of proc(5) from the third on: the state, then numbers. Called by all that
    reads /proc: the search for orphans, the samples of a tick, the stacks, the watch of memory. Raises OSError."""
    with open(f"{proc}/{pid}/stat", "rb") as stat:
        # The name in parentheses may hold anything.
        title, _, rest = stat.read().rpartition(b")")
    return title.partition(b"(")[2], rest.split()


def children_of(pid: int, proc: str | Path = "/proc") -> list[int]:
    """The children of any process that have not been reaped; none of one that has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        # A child belongs to the thread that forked it.
        for thread in os.listdir(f"{proc}/{pid}/task"):
            with contextlib.suppress(OSError), open(f"{proc}/{pid}/task/{thread}/children") as children:
                found += map(int, children.read().split())
    return found


def below(pid: int, most: int | None = None) -> list[int]:
    """A process and all its descendants, except those whose parent has ended; the nearest first, at most so many."""
    found = [pid]
    for each in found:
        if most is not None and len(found) >= most:
            return found[:most]
        found += children_of(each)
    return found


def reap(known: Iterable[int] = ()) -> None:
    """Collect children that have ended, up to the first of the `known` ones, whose exit status its owner collects.

    The kernel shows ended children one at a time, so an owner calls this again after it has collected its child.
    """
    spared = set(known)
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in spared:
            os.waitpid(ended.si_pid, 0)


def end_children(spared: Iterable[int] = ()) -> list[int]:
    """End all children except the `spared` ones, and their orphans. Returns the pids of those that this user may not
    signal; they run on.

    They get ORPHAN_GRACE seconds to end by themselves, and those that clean up after the others CLEANUP_TIMEOUT. This
    process inherits the children of each one that it kills, so it repeats until none is left, or until END_TIMEOUT if
    the kernel does not end one.
    """
    kept = set(spared)
    refused: list[int] = []
    began = time.monotonic()
    give_up = began + END_TIMEOUT
    while (ending := children() - kept) and time.monotonic() < give_up:
        others = {pid for pid in ending if not _cleans_up(pid)}
        due, grace = (others, ORPHAN_GRACE) if others else (ending, CLEANUP_TIMEOUT)
        wait_for_ends(due, began + grace - time.monotonic())
        reap(kept)
        still = due & children()
        for pid in still:
            # Still our unreaped child, so the pid cannot have been reused.
            if not send_signal(pid, signal.SIGKILL):
                refused.append(pid)
                kept.add(pid)
        wait_for_ends(still - kept, give_up - time.monotonic())
        reap(kept)
    return refused


def describe_refused(pids: Sequence[int]) -> str:
    """A line for the user about processes that `end_children` was not permitted to end."""
    shown = ", ".join(f"{pid} ({_name_of(pid)})" for pid in pids[:MAX_NAMED])
    more = f" and {len(pids) - MAX_NAMED} more" if len(pids) > MAX_NAMED else ""
    one = len(pids) == 1
    return (
        f"{'a process' if one else 'processes'} of another user {'was' if one else 'were'} left running, because this "
        f"user may not end {'it' if one else 'them'}: {shown}{more}"
    )


def _name_of(pid: int) -> str:
    try:
        return read_stat(pid)[0].decode(errors="replace")
    except OSError:
        return "ended by now"


def has_ended(pid: int) -> bool:
    """Whether a child has ended; its exit status stays to be collected. True if that has been done."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def wait_for_ends(pids: Iterable[int], timeout: float) -> None:
    """Return when all of `pids`, children of ours, have ended or after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    for pid in pids:
        # One after the other: all are waited for anyway, and any number of them needs only one descriptor.
        if not linux.has_pidfd():
            # SIGCHLD may be blocked or handled elsewhere, so it cannot be waited for.
            while not has_ended(pid) and time.monotonic() < deadline:
                time.sleep(LOOK_INTERVAL)
            continue
        with contextlib.suppress(ProcessLookupError):
            fd = linux.pidfd_open(pid)
            try:
                ended = select.poll()
                ended.register(fd, select.POLLIN)
                ended.poll(max(0.0, deadline - time.monotonic()) * 1000)
            finally:
                os.close(fd)
