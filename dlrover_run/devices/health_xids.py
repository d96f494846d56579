"""The errors that the NVIDIA driver has written to the kernel's log (Xid), for each GPU.

NVML tells of an Xid only to whoever waits for its events at that moment, so that earlier ones are found here alone: in
the kernel's ring buffer, which holds what has happened since the machine started as far as it has room, and which a
container may mostly not read. A line stays there after the GPU was reset, so it proves nothing about now.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass

LOG_MOST = 1 << 20
"""Bytes of the kernel's log that are read, its latest: more than most kernels keep, and read in some milliseconds."""

_SYSLOG_ACTION_READ_ALL = 3

PROGRAM_XIDS = frozenset({13, 31, 43, 45, 68, 69, 109})
"""Errors that a program's own defect causes, or its end: they say nothing of the GPU. They are those that NVIDIA's own
device plugin for Kubernetes passes over, and 69, the like of 13."""

NOTE_XIDS = frozenset({63, 154})
"""Notes rather than errors: a row will be remapped, and what the driver asks to be done. NVML says how that is now."""

# NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.
_LINE = re.compile(r"(?:\[ *(\d+\.\d+)\] )?NVRM: Xid \((?:PCI:)?([0-9a-fA-F]+:[0-9a-fA-F]+:[0-9a-fA-F]+)[^)]*\): (\d+)")


@dataclass(frozen=True)
class Xids:
    """The errors of one GPU: how many there were, the number of the last one, and when that was, in seconds since the
    machine started; None where the kernel writes no times."""

    count: int
    last: int
    at: float | None


def read_kernel_log() -> str:
    """The kernel's log, or nothing where this process may not read it."""
    libc = ctypes.CDLL(None)
    buffer = ctypes.create_string_buffer(LOG_MOST)
    size = libc.klogctl(_SYSLOG_ACTION_READ_ALL, buffer, LOG_MOST)
    return buffer.raw[:size].decode(errors="replace") if size > 0 else ""


def find_xids(log: str) -> dict[str, Xids]:
    """The errors that are not a program's own, by the PCI address of the GPU without its function (`0000:3b:00`)."""
    found: dict[str, Xids] = {}
    for line in log.splitlines():
        match = _LINE.search(line)
        if match is None or int(match[3]) in PROGRAM_XIDS | NOTE_XIDS:
            continue
        domain, bus, device = match[2].lower().split(":")
        name = f"{int(domain, 16):04x}:{bus}:{device}"
        before = found.get(name)
        at = float(match[1]) if match[1] else None
        found[name] = Xids(1 + (before.count if before else 0), int(match[3]), at)
    return found
