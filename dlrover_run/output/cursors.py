"""How far each source of the relay has been shown, in shared memory that outlives the relay.

The memory file has one record per source. A record holds two cursors and a byte that selects the valid one. The
other one is written first and then made valid by that byte, so the relay can be killed at any moment.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import NamedTuple

from dlrover_run import linux

_CURSOR = struct.Struct("=QqQQ")
_FIRST_CURSOR = 8
_RECORD_BYTES = _FIRST_CURSOR + 2 * _CURSOR.size

MAX_SOURCES = 16384
"""Maximum number of records. The kernel provides memory only for the pages that are used."""

OWN_MESSAGES = 0
"""The number of the source that has the launcher's own messages."""

_KEEP_SIZE_AND_PUNCH_HOLE = 3

LINE_BEGUN = 1
"""The beginning of a line was shown, and nothing after it."""

LINE_INTERRUPTED = 2
"""The beginning of a line was shown, and then output of another source; the rest of the line starts a new line."""


class Cursor(NamedTuple):
    """All bytes before `offset` have been shown, and of the output that follows the first `skip` bytes as they appear.

    `skip` is -1 before the write of a newline that ends the unfinished line of another source.
    `unfinished` is `LINE_BEGUN` or `LINE_INTERRUPTED` if the beginning of the line at `offset` was shown, else 0.
    `writing` is 1 + the position in the console's file of a write that was not known to have ended, 0 for none.
    """

    offset: int
    skip: int
    unfinished: int = 0
    writing: int = 0


def create_cursor_table() -> int:
    """Create the memory file and return its descriptor."""
    fd = linux.memfd_create("dlrover-run cursors")
    os.ftruncate(fd, MAX_SOURCES * _RECORD_BYTES)
    return fd


def reset_cursor(fd: int, number: int, offset: int) -> None:
    """Start the record of source `number`: nothing from `offset` on has been shown."""
    os.pwrite(fd, bytes(_FIRST_CURSOR) + _CURSOR.pack(offset, 0, 0, 0), number * _RECORD_BYTES)


class CursorTable:
    """The records of a memory file, as the relay reads and writes them."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, MAX_SOURCES * _RECORD_BYTES)
        os.close(fd)

    def get(self, number: int) -> Cursor:
        start = number * _RECORD_BYTES
        return Cursor(*_CURSOR.unpack_from(self._memory, start + _FIRST_CURSOR + self._memory[start] * _CURSOR.size))

    def put(self, number: int, cursor: Cursor) -> None:
        start = number * _RECORD_BYTES
        other = 1 - self._memory[start]
        _CURSOR.pack_into(self._memory, start + _FIRST_CURSOR + other * _CURSOR.size, *cursor)
        self._memory[start] = other


def release_memory(fd: int, start: int, count: int) -> None:
    """Return a part of a memory file to the kernel. The file keeps its size and reads as zeros there."""
    fallocate = ctypes.CDLL(None).fallocate
    fallocate(fd, _KEEP_SIZE_AND_PUNCH_HOLE, ctypes.c_long(start), ctypes.c_long(count))
