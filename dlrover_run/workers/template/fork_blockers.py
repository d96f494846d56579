"""Reasons why a process must not be forked into workers.

A fork copies only the thread that calls it, so a lock that another thread holds stays locked for ever in the copy. An
accelerator's context does not survive a fork. A socket or a pipe would be shared by all workers. Each result is the
REASON of the message "--start-method=forkserver: REASON; workers are spawned instead".
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
from collections.abc import Collection

ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render", "/dev/accel", "/dev/davinci", "/dev/neuron", "/dev/hl")
HARMLESS_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")

SETTLING_FORKS = 3
"""Trial forks before a thread counts as persistent. Libraries such as OpenBLAS end their threads at a fork, and a
thread that has just ended may be listed for a moment longer."""


def thread_names() -> list[str]:
    """The kernel's names of this process's threads except the main thread."""
    names = []
    for task in os.listdir("/proc/self/task"):
        if int(task) != os.getpid():
            try:
                with open(f"/proc/self/task/{task}/comm") as name:
                    names.append(name.read().strip())
            except OSError:
                continue
    return names


def persistent_threads() -> list[str]:
    """The names of threads that exist after trial forks; Python's names if Python knows the threads."""
    for _ in range(SETTLING_FORKS):
        if not thread_names():
            return []
        # Libraries that stop their threads before a fork stop them now.
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    left = thread_names()
    threading = sys.modules.get("threading")
    if left and threading is not None:
        known = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        return known or left
    return left


def child_processes() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as children:
            return [int(child) for child in children.read().split()]
    except OSError:
        return []


def end_children() -> None:
    """Kill the processes that imports started in a process that will not be used."""
    for child in child_processes():
        # It may have ended, or be of another user.
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)


def descriptor_blocker(descriptors: dict[int, tuple[str, int]]) -> str | None:
    """The reason why open files forbid a fork, or None; each descriptor has its target and its mode (`st_mode`)."""
    for target, mode in descriptors.values():
        if target.startswith(ACCELERATORS):
            return f"the accelerator {target} is open"
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or target in HARMLESS_DEVICES:
            continue
        kind = "a socket" if stat.S_ISSOCK(mode) else "a pipe" if stat.S_ISFIFO(mode) else target
        return f"{kind} is open, which all workers would share"
    return None


def open_descriptors(ours: Collection[int]) -> dict[int, tuple[str, int]]:
    """The descriptors of this process except the standard three and `ours`."""
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in ours:
            try:
                found[fd] = (os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_mode)
            except OSError:
                continue
    return found


def quick_fork_blocker(ours: Collection[int]) -> str | None:
    """The checks that take microseconds, made before each fork. `ours` are descriptors that the worker closes."""
    descriptor = descriptor_blocker(open_descriptors(ours))
    if descriptor is not None:
        return descriptor
    if getattr(sys.modules.get("torch.cuda"), "is_initialized", bool)():
        return "CUDA is initialised"
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    if getattr(tracker, "_fd", None) is not None:
        return "multiprocessing's resource tracker is running"
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    if getattr(server, "_forkserver_alive_fd", None) is not None:
        return "multiprocessing's forkserver is running"
    threads = thread_names()
    return f"the thread {threads[0]} is running" if threads else None


def fork_blocker_between_imports(ours: Collection[int]) -> str | None:
    """The checks between two imports: the quick ones, or all once a thread exists, because it may still end."""
    return fork_blocker(ours) if thread_names() else quick_fork_blocker(ours)


def fork_blocker(ours: Collection[int]) -> str | None:
    """All checks, made after imports: the quick ones, persistent threads, and child processes."""
    threads = persistent_threads()
    if threads:
        return f"the thread {threads[0]} is running"
    children = child_processes()
    if children:
        return f"the process {children[0]} was started"
    return quick_fork_blocker(ours)
