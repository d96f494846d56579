"""The memory of another process, for reading.

/proc/PID/mem and not `process_vm_readv`: the kernel asks for the same right (that of ptrace, which a parent has for its
descendants unless the machine forbids it), and the filter of system calls of a container does not matter.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

WORD = struct.Struct("=Q")

MAX_READ = 1 << 20
"""Bytes of one read. A length that was read from a process that changes it may be anything."""

_HIGHEST = 1 << 63


class Unreadable(Exception):
    """What was read is no address, no length or no object that it should be."""


class Mapping(NamedTuple):
    """The first part of a file in memory: where it begins, and its path."""

    start: int
    path: str


class ProcessMemory:
    """The memory of a process. Raises OSError if it has ended, and PermissionError if this process has no right to
    trace it. `close` it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)

    def read(self, address: int, size: int) -> bytes:
        """Bytes at an address. Raises Unreadable."""
        if not 0 < address < _HIGHEST or not 0 <= size <= MAX_READ:
            raise Unreadable
        try:
            data = os.pread(self._fd, size, address)
        except OSError as error:
            raise Unreadable from error
        if len(data) < size:
            raise Unreadable
        return data

    def word(self, address: int) -> int:
        """The pointer or size at an address. Raises Unreadable."""
        found: int = WORD.unpack(self.read(address, WORD.size))[0]
        return found

    def close(self) -> None:
        os.close(self._fd)


def mapped_files(pid: int) -> list[Mapping]:
    """The files whose first bytes are in the memory of a process. Raises OSError."""
    found = []
    with open(f"/proc/{pid}/maps", errors="replace") as lines:
        for line in lines:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/") and int(fields[2], 16) == 0:
                found.append(Mapping(int(fields[0].partition("-")[0], 16), fields[5]))
    return found
