"""The end of an output, in memory that relay and agent share: the relay writes it, the agent reads it at any time.

The memory file has a count of the bytes that were written, and after it a ring: byte number n of the output stands at
n modulo the size of the ring. The writer stores the bytes first and the count after them, so it may be killed at any
moment. It writes at most MAX_WRITE bytes before it stores the count, so a reader knows which of the bytes that it has
copied may have been overwritten meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import resource
import struct

from dlrover_run import linux

TAIL_BYTES = 32 * 1024
"""Bytes of an output's end that are kept for the failure report."""

RING_BYTES = 512 * 1024
"""Bytes of the end of an output that are kept: for `dlrover-run logs`, which may read later than the worker writes."""

MAX_WRITE = 64 * 1024
"""Maximum bytes of one write into a ring of the usual size; half of a smaller one."""

_COUNT = struct.Struct("=Q")


def create_ring() -> int:
    """Create the memory file and return its descriptor. Raises OSError.

    It is as large as `ulimit -f` permits, which counts for files in memory too. The kernel provides memory only for
    what is written."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = _COUNT.size + RING_BYTES
    fd = linux.memfd_create("dlrover-run output")
    os.ftruncate(fd, size if limit == resource.RLIM_INFINITY else min(size, limit))
    return fd


def written(fd: int) -> int:
    """How many bytes of the output have been written."""
    header = os.pread(fd, _COUNT.size, 0)
    return int(_COUNT.unpack(header)[0]) if len(header) == _COUNT.size else 0


def read(fd: int, start: int, count: int) -> tuple[int, bytes]:
    """Bytes `start` to `start + count` of the output, or those of them that are kept, and the number of the first."""
    size = _size(fd)
    total = written(fd)
    first = max(start, total + _max_write(size) - size)
    end = min(first + count, total)
    data = b""
    while size > 0 and first + len(data) < end:
        at = (first + len(data)) % size
        part = os.pread(fd, min(size - at, end - first - len(data)), _COUNT.size + at)
        if not part:
            break
        data += part
    lost = min(len(data), max(0, written(fd) + _max_write(size) - size - first))
    return first + lost, data[lost:]


def tail(fd: int) -> tuple[bytes, bool]:
    """The last TAIL_BYTES of the output, and whether there was more before them."""
    first, data = read(fd, max(0, written(fd) - TAIL_BYTES), TAIL_BYTES)
    return data, first > 0


def tail_text(data: bytes, cut: bool) -> str:
    """The end of an output as text; if its beginning was `cut` off, it starts with a whole line if it has one."""
    if cut:
        _, newline, rest = data.partition(b"\n")
        if newline and rest:
            data = rest
    return data.decode(errors="replace")


def read_log_tail(path: str, limit: int = TAIL_BYTES) -> str:
    """The last `limit` bytes of a log file as text, starting with a whole line; empty if it cannot be read."""
    try:
        with open(path, "rb") as log:
            start = max(0, log.seek(0, os.SEEK_END) - limit)
            log.seek(start)
            return tail_text(log.read(limit), cut=start > 0)
    except OSError:
        return ""


def _max_write(size: int) -> int:
    return min(MAX_WRITE, size // 2)


def _size(fd: int) -> int:
    return os.fstat(fd).st_size - _COUNT.size


class RingWriter:
    """Writes an output into its ring; it closes the descriptor. One process at a time writes."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._size = _size(fd)
        self._count = written(fd)

    def write(self, data: bytes) -> None:
        """Store the next bytes. Where there is no memory for them, the end of this output stays unknown."""
        if self._size <= 0:
            return
        view = memoryview(data)
        with contextlib.suppress(OSError):
            while view:
                at = self._count % self._size
                count = os.pwrite(self._fd, view[: min(_max_write(self._size), self._size - at)], _COUNT.size + at)
                view = view[count:]
                self._count += count
                os.pwrite(self._fd, _COUNT.pack(self._count), 0)

    def close(self) -> None:
        os.close(self._fd)
