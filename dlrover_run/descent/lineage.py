"""Descent: whose child a process is, and that nothing a job started outlives its owner.

The kernel gives two tools. A *child subreaper* inherits every orphan among its descendants, so a daemon that a worker
left behind comes to us instead of vanishing to process 1. A *parent death signal* ends a child when its parent dies,
also by SIGKILL. The guard and the agent are both subreapers and watch each other; a worker has the death signal.

One kind of process is spared by every look and every sweep: a master, which other nodes need after the launcher that
started it has gone. It bears MASTER_NAME and leads a session, and it ends itself with its last node.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

from dlrover_run.template import title

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
# Loaded once: a child between fork and exec must not load libraries.
_libc = ctypes.CDLL(None, use_errno=True)

MASTER_NAME = "dlrover-master"
"""How a master is known, as the guard has to know it that never heard of the process which its dead agent started."""

STRAY_GRACE = 0.4
"""Seconds that a process left behind by a dead worker gets to end by itself before it is killed.

Python's resource tracker and torch's shared-memory manager need them: both notice the death, remove what the worker
left in /dev/shm and end. Killing them at once would leave those segments for ever.
"""

SWEEP_TIMEOUT = 5.0
"""Seconds after which a sweep gives up on processes that the kernel will not end (uninterruptible sleep)."""


def become_subreaper() -> None:
    """Make this process inherit the orphans among its descendants. Raises OSError on kernels before 3.4."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies. `parent` is the pid expected; if it has died already,
    exit.

    Runs in a child right after fork. The signal is bound to the thread that forked, which for us is the only one.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def go_on_without_parent() -> None:
    """Have the kernel continue this process, should it be stopped, when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def name_process(name: str) -> None:
    """Set the name that `top` and `ps` show (15 bytes in `top`).

    It takes the place of the whole command line, so that `pkill -9 -f train.py` ends the guard and the workers of that
    script and leaves those that sweep up after them.
    """
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))
    title.show((name,), os.environ)


def _prctl(option: int, argument: int | ctypes.c_char_p) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


@dataclass(frozen=True)
class Relative:
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
        # There are none, as at the end of nearly every job, and nobody else's processes need be looked at to say so.
        return set()
    return {process.pid for process in _processes() if process.parent == os.getpid()}


def descendants(spared: Iterable[int] = ()) -> list[Relative]:
    """All processes below this one, except masters, the `spared` children and what is below those."""
    kept = set(spared)
    # Nearly always there is nobody else. This list may miss a child while another one ends, which the next look finds;
    # it spares us a look at every process of a large machine.
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as nearest:
        if {int(pid) for pid in nearest.read().split()} <= kept:
            return []
    return _below([os.getpid()], [process for process in _processes() if process.pid not in kept])


def ancestors(most: int) -> list[int]:
    """The pids of this process's ancestors, the nearest first, at most that many."""
    found = [os.getppid()]
    while found[-1] > 1 and len(found) < most:
        try:
            with open(f"/proc/{found[-1]}/stat", "rb") as stat:
                found.append(int(stat.read().rpartition(b")")[2].split()[1]))
        except OSError:
            break
    return found


def end(doomed: Iterable[Relative], spared: Iterable[int]) -> None:
    """Kill those of `doomed` that still live below this process, and what is below them."""
    here = descendants(spared)
    # A number that was given to another process meanwhile has another start; a parent may have changed.
    lives = {(process.pid, process.started) for process in doomed}
    still = [process for process in here if (process.pid, process.started) in lives]
    for pid in {process.pid for process in [*still, *_below([process.pid for process in still], here)]}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _below(roots: Iterable[int], processes: Iterable[Relative]) -> list[Relative]:
    by_parent: dict[int, list[Relative]] = {}
    for process in processes:
        by_parent.setdefault(process.parent, []).append(process)
    found: list[Relative] = []
    parents = list(roots)
    while parents:
        nearer = by_parent.pop(parents.pop(), [])
        found += nearer
        parents += [process.pid for process in nearer]
    return found


def _processes() -> list[Relative]:
    """One look at every process of this machine that /proc shows us, except masters; none where /proc is of another pid
    namespace."""
    found: list[Relative] = []
    if os.readlink("/proc/self") != str(os.getpid()):
        return found
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                # The name in parentheses may hold anything; the fields after it are numbers but for the state.
                title, _, rest = stat.read().rpartition(b")")
                fields = rest.split()
                relative = Relative(int(name), int(fields[1]), int(fields[3]), int(fields[19]))
                if relative.session != relative.pid or title.partition(b"(")[2] != MASTER_NAME.encode():
                    found.append(relative)
    return found


def reap(known: Iterable[int] = ()) -> None:
    """Collect children that have ended, up to the first of the `known` ones, whose owner wants its exit status.

    The kernel shows ended children one at a time, so an owner that has collected his calls this again.
    """
    spared = set(known)
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in spared:
            os.waitpid(ended.si_pid, 0)


def end_children(spared: Iterable[int] = ()) -> None:
    """End all children but the `spared` ones, their orphans too.

    They get STRAY_GRACE seconds to end by themselves. Killing one hands us its children in turn, so this goes on until
    none is left, or until SWEEP_TIMEOUT when the kernel itself does not let go of one.
    """
    kept = set(spared)
    give_up = time.monotonic() + SWEEP_TIMEOUT
    soft_deadline = time.monotonic() + STRAY_GRACE
    while (doomed := children() - kept) and time.monotonic() < give_up:
        _wait_for_ends(doomed, soft_deadline - time.monotonic())
        reap(kept)
        still = doomed & children()
        for pid in still:
            # Still our unreaped child, so the number cannot have been given to somebody else.
            os.kill(pid, signal.SIGKILL)
        _wait_for_ends(still, give_up - time.monotonic())
        reap(kept)


def _wait_for_ends(pids: Iterable[int], timeout: float) -> None:
    """Return when all of `pids`, children of ours, have ended or after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    for pid in pids:
        # One after the other: all are waited for anyway, and so any number of them takes one descriptor.
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                ended = select.poll()
                ended.register(fd, select.POLLIN)
                ended.poll(max(0.0, deadline - time.monotonic()) * 1000)
            finally:
                os.close(fd)
