"""What the main thread of a worker waits for at one moment, by the function of the kernel in which it sleeps.

A worker that waits in a collective sleeps on a futex until a thread of the backend wakes it. One that waits for its
data loader reads a pipe or polls, and one that reads a file waits for a disk.
"""

from __future__ import annotations

import contextlib
import enum
from typing import NamedTuple

from dlrover_run.processes.tree import read_stat

NANOSECONDS = 1e9


class Waits(enum.StrEnum):
    """What a main thread waits for."""

    PEERS = "peers"
    """A thread of its own process: in a collective, for the other workers."""
    DATA = "data"
    """Another process, or a connection that it reads itself."""
    DISK = "disk"
    """A disk, a network file system or a device."""
    TIME = "time"
    """A time that the script has named: it sleeps."""
    NOTHING = "nothing"
    """It runs, or may run as soon as a processor is free."""


_INTERRUPTIBLE = ("futex", "nanosleep")
"""Parts of functions in which a thread sleeps so that a signal ends it: its state, which costs more, is known then."""

_FILES = ("request_wait_answer", "rpc_wait_bit", "nfs", "fuse", "ceph", "lustre", "folio_wait", "io_schedule")


class MainThread(NamedTuple):
    """The main thread of a worker. `waits` is None where the kernel does not tell, or while the thread is stopped.
    `queued` are the seconds since its start in which it could have run and had no processor."""

    waits: Waits | None
    queued: float = 0.0


def read_main_thread(pid: int, with_queued: bool = True, proc: str = "/proc") -> MainThread | None:
    """The main thread of a worker; None if the worker has ended. Without `with_queued` that figure is 0."""
    function = ""
    with contextlib.suppress(OSError):
        function = _read(f"{proc}/{pid}/wchan")
    state = "S"
    if not any(name in function for name in _INTERRUPTIBLE):
        try:
            _, fields = read_stat(pid, proc)
        except OSError:
            return None
        state = fields[0].decode()
        if state in "ZX":
            return None
    return MainThread(
        classify(state, "" if function == "0" else function), _read_queued(pid, proc) if with_queued else 0.0
    )


def _read_queued(pid: int, proc: str) -> float:
    # Of the thread whose id is that of the process. A kernel without the figures writes zeros, or has no such file.
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_read(f"{proc}/{pid}/schedstat").split()[1]) / NANOSECONDS
    return 0.0


def classify(state: str, function: str) -> Waits | None:
    """What a thread waits for whose state in /proc/PID/stat is this letter, and which sleeps in this function of the
    kernel, empty if that is unknown."""
    if state == "R":
        return Waits.NOTHING
    if state == "D":
        return Waits.DISK
    if state != "S" or not function:
        return None
    if "futex" in function:
        return Waits.PEERS
    if "nanosleep" in function:
        return Waits.TIME
    return Waits.DISK if function.startswith(_FILES) else Waits.DATA


def _read(path: str) -> str:
    with open(path, errors="replace") as file:
        return file.read().strip("\0\n")
