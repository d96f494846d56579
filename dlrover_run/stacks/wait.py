"""What a main thread waits for, as the kernel and the memory of its process show it: a time, or a device."""

from __future__ import annotations

import os
import re
import struct
import time
from typing import NamedTuple

from dlrover_run.stacks.memory import ProcessMemory, Unreadable

_SLEEPS = {
    "x86_64": {35: (0, None, 0), 230: (2, 0, 1)},
    "aarch64": {101: (0, None, 0), 115: (2, 0, 1)},
}
"""By machine and number of the system call: the position of the time among its arguments, that of the clock, and that
of the flags. `nanosleep` has neither clock nor flags."""

_ABSOLUTE = 1
_CLOCKS = {0: time.CLOCK_REALTIME, 1: time.CLOCK_MONOTONIC}
_TIME = struct.Struct("=qq")

MAX_SLEEP = 1e9
"""Seconds of a longer sleep are these."""

_DEVICES = re.compile(r"^/dev/(?:nvidia\d|kfd$|accel|davinci|dri/renderD|hl\d)|/libcuda\.so")
"""Files that a process has mapped or opened which computes on an accelerator."""


class Wait(NamedTuple):
    """`sleeps` are the seconds for which the main thread still sleeps, or of a relative sleep those of all of it; None
    if it does not sleep, or that is not known. `has_device`: the process has an accelerator open."""

    sleeps: float | None = None
    has_device: bool = False


def read_wait(pid: int, proc: str = "/proc") -> Wait:
    """What the main thread of a process waits for. It costs some milliseconds: for a worker that makes no progress."""
    return Wait(_read_sleep(pid, proc), _has_device(pid, proc))


def _read_sleep(pid: int, proc: str) -> float | None:
    try:
        with open(f"{proc}/{pid}/syscall") as file:
            number, *arguments = file.read().split()
        known = _SLEEPS.get(os.uname().machine, {}).get(int(number))
        if known is None:
            return None
        at, clock, flags = known
        values = [int(argument, 16) for argument in arguments[:6]]
        memory = ProcessMemory(pid)
    except (OSError, ValueError):
        return None
    try:
        seconds, nanoseconds = _TIME.unpack(memory.read(values[at], _TIME.size))
    except (Unreadable, IndexError):
        return None
    finally:
        memory.close()
    length: float = seconds + nanoseconds / 1e9
    if clock is not None and values[flags] & _ABSOLUTE:
        if values[clock] not in _CLOCKS:
            return None
        length -= time.clock_gettime(_CLOCKS[values[clock]])
    return min(max(0.0, length), MAX_SLEEP)


def _has_device(pid: int, proc: str) -> bool:
    try:
        return any(_DEVICES.search(os.readlink(entry.path)) for entry in os.scandir(f"{proc}/{pid}/fd"))
    except OSError:
        return False
