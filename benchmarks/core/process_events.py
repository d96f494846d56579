"""When processes begin and end, by the kernel's own account: a script cannot note when it is dead, and the begin that
/proc shows it has a resolution of ten milliseconds.

The kernel's connector for process events (`linux/cn_proc.h`) sends each fork and each exit with its time. Only root may
listen to it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from core.ratios import Lost
from core.run import NANOSECOND

NETLINK_CONNECTOR = 11
CN_IDX_PROC = 1
BUFFER_BYTES = 32 * 1024 * 1024
"""Events are read at the end of a run, so that nothing runs beside it."""

MESSAGE_BYTES = 4096
FORK, EXIT = 0x1, 0x8000_0000

_HEADER = struct.Struct("=IHHII")
_CONNECTOR = struct.Struct("=IIIIHH")
_EVENT = struct.Struct("=I4xQ")
_PROCESSES = struct.Struct("=IIII")


class Life(NamedTuple):
    """When a process was forked and when it was dead, in seconds of the monotonic clock; None if that is not known."""

    began: float | None = None
    ended: float | None = None


def why_absent() -> str | None:
    """Why the kernel's events cannot be had here; None if they can."""
    return None if os.geteuid() == 0 else "only root may listen to the kernel's events of processes"


@contextlib.contextmanager
def process_events() -> Iterator[Callable[[], dict[int, Life]]]:
    """Listen; gives what returns the lives of all processes that began or ended since, by pid. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, NETLINK_CONNECTOR) as listener:
        force = getattr(socket, "SO_RCVBUFFORCE", 33)
        listener.setsockopt(socket.SOL_SOCKET, force, BUFFER_BYTES)
        listener.bind((0, CN_IDX_PROC))
        _subscribe(listener, 1)
        listener.setblocking(False)
        lives: dict[int, Life] = {}

        def read() -> dict[int, Life]:
            _read(listener, lives)
            return lives

        yield read
        listener.setblocking(True)
        _subscribe(listener, 2)


def _subscribe(listener: socket.socket, operation: int) -> None:
    body = _CONNECTOR.pack(CN_IDX_PROC, 1, 0, 0, 4, 0) + struct.pack("=I", operation)
    listener.send(_HEADER.pack(_HEADER.size + len(body), 3, 0, 0, 0) + body)


def _read(listener: socket.socket, lives: dict[int, Life]) -> None:
    while True:
        try:
            data = listener.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                raise Lost("there were more events of processes than the buffer holds") from None
            raise
        note(data[_HEADER.size + _CONNECTOR.size :], lives)


def note(event: bytes, lives: dict[int, Life]) -> None:
    """Take one event, a `struct proc_event`. Pure but for `lives`."""
    if len(event) < _EVENT.size + _PROCESSES.size:
        return
    what, at = _EVENT.unpack_from(event)
    _, second, third, fourth = _PROCESSES.unpack_from(event, _EVENT.size)
    if what == FORK and third == fourth:
        lives[third] = Life(began=at * NANOSECOND)
    elif what == EXIT:
        # Of each thread; the last one ends the process.
        lives[second] = Life(lives.get(second, Life()).began, at * NANOSECOND)


def moment(lives: Mapping[int, Life], pid: int, what: str) -> float:
    """When that process "began" or "ended". Raises Lost if the kernel has not said so."""
    at: float | None = getattr(lives.get(pid, Life()), what)
    if at is None:
        raise Lost(f"the kernel has no event of when process {pid} {what}")
    return at
