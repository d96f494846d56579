"""System calls and constants of Linux that a Python may lack although the kernel has them.

CPython leaves out what the headers of its build do not declare. Conda's interpreters, and those of uv before the middle
of 2026, are built with the headers of glibc 2.17 and Linux 3.10, so that they run on old machines: they lack
`memfd_create` (Linux 3.17), `pidfd_open` (5.3) and others on a kernel of today. The functions here call the kernel by
number where Python has no function. Scripts import this module through `dlrover_run.training`, so `ctypes` is imported
only where it is needed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal

MFD_CLOEXEC = 0x1
MFD_ALLOW_SEALING = 0x2

F_ADD_SEALS = 1033
F_GET_SEALS = 1034
F_SEAL_SEAL = 0x1
F_SEAL_SHRINK = 0x2
F_SEAL_GROW = 0x4
F_SEAL_WRITE = 0x8
F_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1: refuses writes and new writable mappings; the mappings that exist stay writable."""

MAX_TRIED = 65536
"""Descriptors below this number are found by `open_descriptors` where there is no /proc to list them."""

NO_PIDFD = (
    "the kernel refuses pidfd_open (Linux before 5.3, or the seccomp profile of an older container runtime): the ends "
    "of processes are learned from SIGCHLD instead"
)
"""The sentence that the agent shows once where `has_pidfd` is False. The job runs as with pidfds."""

# Since Linux 5.0 a new call has the same number on all machines (but alpha); memfd_create is older.
_PIDFD_SEND_SIGNAL = 424
_PIDFD_OPEN = 434
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279, "riscv64": 279, "loongarch64": 279, "ppc64le": 360, "s390x": 350}


def memfd_create(name: str, flags: int = MFD_CLOEXEC) -> int:
    """A descriptor of a new file in memory, which has no name in a file system. Raises OSError."""
    if create := getattr(os, "memfd_create", None):
        return int(create(name, flags))
    number = _MEMFD_CREATE.get(os.uname().machine)
    if number is None:
        raise OSError(
            errno.ENOSYS, f"this Python has no os.memfd_create, and its number on {os.uname().machine} is unknown"
        )
    return _call("memfd_create", number, os.fsencode(name), flags)


def pidfd_open(pid: int) -> int:
    """A descriptor that becomes readable when the process ends. Raises OSError, also where a container's seccomp
    profile or a kernel before 5.3 refuses it (see `has_pidfd`)."""
    if open_ := getattr(os, "pidfd_open", None):
        return int(open_(pid))
    return _call("pidfd_open", _PIDFD_OPEN, pid, 0)


def pidfd_send_signal(pidfd: int, number: signal.Signals) -> None:
    """Send a signal to the process of a pidfd, whose pid may have been reused since. Raises OSError."""
    if send := getattr(signal, "pidfd_send_signal", None):
        send(pidfd, number)
    else:
        _call("pidfd_send_signal", _PIDFD_SEND_SIGNAL, pidfd, int(number), None, 0)


@functools.cache
def has_pidfd() -> bool:
    """Whether the kernel lets this process open pidfds. Kernels before 5.3 do not know the call, and the seccomp
    profiles of older container runtimes refuse it with EPERM."""
    try:
        os.close(pidfd_open(os.getpid()))
    except OSError as error:
        # Not for lack of descriptors or memory, which pass.
        return error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES)
    return True


def raise_descriptor_limit() -> None:
    """Have this process open as many descriptors as it may: the usual limit of 1,024 is lower than allowed. Not for a
    process that starts programs: they inherit the limit, and some cannot handle a high one."""
    import resource

    _, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, highest))


def open_descriptors() -> list[int]:
    """The descriptors that this process has open. One of them may be closed by now: that of the list itself.

    They are read from /proc: a limit of 10**9 descriptors, usual in containers, is no upper bound to count to. Where
    there is no /proc, each number below MAX_TRIED is tried, which takes some 10 ms.
    """
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return [fd for fd in range(min(os.sysconf("SC_OPEN_MAX"), MAX_TRIED)) if _is_open(fd)]


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def close_from(first: int, kept: int) -> None:
    """Close every descriptor from `first` on except `kept`: `os.closerange` of a Python built without close_range(2)
    closes each number below the limit, which may take minutes."""
    for fd in open_descriptors():
        if fd >= first and fd != kept:
            # The descriptor of the list itself is closed already.
            try:
                os.close(fd)
            except OSError:
                continue


def _call(name: str, number: int, *arguments: int | bytes | None) -> int:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    words = [ctypes.c_long(each) if isinstance(each, int) else ctypes.c_char_p(each) for each in arguments]
    result = int(libc.syscall(ctypes.c_long(number), *words))
    if result < 0:
        code = ctypes.get_errno()
        if code == errno.ESRCH:
            raise ProcessLookupError(code, os.strerror(code))
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result
