"""How far each source of the relay has been shown, in memory that outlives the relay.

A record is which of two entries counts, and the entries. The other one is written and then made to count, by one byte,
so that a relay can be killed at any moment.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import NamedTuple

_ENTRY = struct.Struct("=QQQQ")
_FIRST_ENTRY = 8
_RECORD_BYTES = _FIRST_ENTRY + 2 * _ENTRY.size

MAX_SOURCES = 16384
"""How many sources may have a record at once, which takes memory only as far as it is used."""

_KEEP_SIZE_AND_PUNCH_HOLE = 3


def create_cursor_table() -> int:
    """A memory file for records."""
    fd = os.memfd_create("dlrover-run marks", os.MFD_CLOEXEC)
    os.ftruncate(fd, MAX_SOURCES * _RECORD_BYTES)
    return fd


def reset_cursor(fd: int, number: int, position: int) -> None:
    """Begin a record: nothing has been shown of what comes from `position` on."""
    os.pwrite(fd, bytes(_FIRST_ENTRY) + _ENTRY.pack(position, 0, 0, 0), number * _RECORD_BYTES)


LINE_BEGUN = 1
"""The beginning of a line has been shown, and nothing after it."""

LINE_INTERRUPTED = 2
"""The beginning of a line has been shown, and then what another source has; the rest of it begins a line again."""


class Cursor(NamedTuple):
    """All before `position` has been shown, and of what follows the first `skip` bytes as they appear.

    `unfinished` says whether the beginning of the line at `position` has been shown: `LINE_BEGUN`, `LINE_INTERRUPTED`
    or 0. `writing` is one more than where a
    file was written to whose write was not known to have ended, 0 for none.
    """

    position: int
    skip: int
    unfinished: int = 0
    writing: int = 0


class CursorTable:
    """The records in such a file, as the relay reads and writes them."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, MAX_SOURCES * _RECORD_BYTES)
        os.close(fd)

    def get(self, number: int) -> Cursor:
        """The record of a source."""
        start = number * _RECORD_BYTES
        return Cursor(*_ENTRY.unpack_from(self._memory, start + _FIRST_ENTRY + self._memory[start] * _ENTRY.size))

    def put(self, number: int, mark: Cursor) -> None:
        """Replace a record."""
        start = number * _RECORD_BYTES
        other = 1 - self._memory[start]
        _ENTRY.pack_into(self._memory, start + _FIRST_ENTRY + other * _ENTRY.size, *mark)
        self._memory[start] = other


def release_memory(fd: int, start: int, count: int) -> None:
    """Give the memory of a part of a memory file back; its size stays, and it reads as zeros there."""
    fallocate = ctypes.CDLL(None).fallocate
    fallocate(fd, _KEEP_SIZE_AND_PUNCH_HOLE, ctypes.c_long(start), ctypes.c_long(count))
