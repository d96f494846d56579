"""What the relay writes to: the console's descriptors and filtered log files.

No write may block the relay. The open file of a console is shared with the shell and with the workers, so it cannot be
made non-blocking; the relay opens it a second time, which gives it an open file of its own.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import stat
import time
from collections import deque
from collections.abc import Callable

QUEUE_LIMIT = 64 * 1024
"""Bytes queued for a console above which its sources are no longer read. They are lost if the relay is killed."""

KEPT_BYTES = 4 * 1024 * 1024
"""Bytes kept for a file that takes none for a while."""

PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE})
"""Errors of a file that may pass: someone frees space, a network file system comes back."""

RETRY_SECONDS = 1.0
"""Seconds from such an error to the next attempt."""

PROMPT_SECONDS = 0.1
"""Seconds of quiet before an unfinished line is shown on a terminal.

A prompt has no newline, and the user must see it. `print` writes a text and its newline separately, so without a delay
the lines of several workers would be joined.
"""

UNFINISHED_SECONDS = 2.0
"""The same for a console that is no terminal: there is no prompt to answer, but the last output of a worker that is
stuck matters."""

Write = Callable[[memoryview], int]
"""Writes some of the bytes and returns how many; raises BlockingIOError when none can be written now."""


class Sink:
    """A descriptor to write to, with a queue of what it has not taken yet.

    It is `dead` once a write has failed for good: what is put into it is then dropped, and the sources go on. After one
    of the errors PASSING of a file it is `postponed`: it is tried again, and keeps the last KEPT_BYTES meanwhile, so
    that no worker waits for the disk. A line says how much is missing.
    """

    def __init__(self, fd: int, write: Write, *, waits: bool = False) -> None:
        self.fd = fd
        self.waits = waits
        """Whether a write can be refused for now, so that the relay has to wait until the descriptor is writable."""
        self.put_bytes = 0
        self.written_bytes = 0
        self.name = ""
        self.error: OSError | None = None
        self.refused_with: OSError | None = None
        self.retry_at: float | None = None
        """When a file that refused the last write is tried again; None if it did not."""
        self.reported = False
        """Whether the user has read of the error."""
        self.watched = False
        """Whether the poller waits until the descriptor is writable."""
        self.unfinished_after: float | None = None
        """Seconds for which a `LineWriter` holds an unfinished line back; None: until its end has arrived."""
        self.unfinished_by: object | None = None
        """The writer whose unfinished line was put last; None at the beginning of a line."""
        self._write = write
        self._queue: deque[memoryview] = deque()
        self._lost = 0
        self._notice = b""
        self._regular = fd >= 0 and stat.S_ISREG(os.fstat(fd).st_mode)

    @property
    def dead(self) -> bool:
        return self.error is not None

    @property
    def postponed(self) -> bool:
        """Whether the last write was refused for now, so that no one can wait for the next one."""
        return self.retry_at is not None

    @property
    def pending(self) -> bool:
        return bool(self._queue)

    @property
    def has_room(self) -> bool:
        return self.postponed or self.put_bytes - self.written_bytes < QUEUE_LIMIT

    def put(self, data: bytes, writer: object | None = None) -> None:
        """Queue output. `writer` is its `LineWriter`, None for output that is not cut into lines."""
        if not data or self.dead:
            return
        if self.unfinished_by not in (None, writer) and data[:1] != b"\r":
            data = b"\n" + data
        self.unfinished_by = writer if data[-1:] not in (b"\n", b"\r") else None
        self._queue.append(memoryview(data))
        self.put_bytes += len(data)
        while self.postponed and self.put_bytes - self.written_bytes > KEPT_BYTES and len(self._queue) > 1:
            lost = len(self._queue.popleft())
            self.written_bytes += lost
            self._lost += lost

    def flush(self) -> None:
        """Write what the descriptor takes now."""
        if self.retry_at is not None and time.monotonic() < self.retry_at:
            return
        if self._lost and not self._notice:
            self._notice = f"\n... {self._lost} bytes of output are missing here: the file took none ...\n".encode()
            self._lost = 0
        while self._queue:
            view = self._queue[0]
            try:
                while self._notice:
                    self._notice = self._notice[self._write(memoryview(self._notice)) :]
                count = self._write(view)
            except BlockingIOError:
                return
            except OSError as error:
                if self._regular and error.errno in PASSING:
                    self.retry_at = time.monotonic() + RETRY_SECONDS
                    self.refused_with = error
                else:
                    self.fail(error)
                return
            if self.postponed:
                self.retry_at, self.reported = None, False
            if count == len(view):
                self._queue.popleft()
            else:
                self._queue[0] = view[count:]
            self.written_bytes += count

    def retry_now(self) -> None:
        """Try at the next `flush`: it may be the last one."""
        if self.postponed:
            self.retry_at = 0.0

    def fail(self, error: OSError) -> Sink:
        self.error = error
        self.retry_at = None
        self._queue.clear()
        self.written_bytes = self.put_bytes
        return self

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def console_sink(fd: int, *, shared: bool = False) -> Sink:
    """The sink for a standard descriptor of the launcher, whatever is behind it.

    On a console that is `shared` with the relays of other nodes, each write has whole lines only, and no more bytes
    than a pipe takes at once or not at all (PIPE_BUF): a partial write would be followed by a line of another node. A
    line that is longer may be broken, and so may any line on a terminal, which gives no such guarantee, if it is full.
    """
    sink = _console_sink(fd, shared)
    sink.name = f"descriptor {fd}"
    if not shared:
        # With several relays none knows whose line is unfinished.
        sink.unfinished_after = PROMPT_SECONDS if sink.fd >= 0 and os.isatty(sink.fd) else UNFINISHED_SECONDS
    return sink


def _console_sink(fd: int, shared: bool) -> Sink:
    mode = os.fstat(fd).st_mode

    def by_lines(write: Write) -> Write:
        return (lambda view: write(piece_of(view, select.PIPE_BUF))) if shared else write

    if stat.S_ISSOCK(mode):
        connection = socket.socket(fileno=os.dup(fd))
        return Sink(connection.fileno(), by_lines(lambda view: connection.send(view, socket.MSG_DONTWAIT)), waits=True)
    if not stat.S_ISFIFO(mode) and not os.isatty(fd):
        # A regular file or /dev/null takes everything. It is not opened again, so that the file position stays shared.
        return Sink(fd, lambda view: os.write(fd, view))
    try:
        own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (PermissionError, FileNotFoundError):
        # Another user's terminal (after `su`), or no /proc: write only as much as a writable pipe certainly takes.
        return Sink(fd, by_lines(lambda view: _write_if_ready(fd, view)), waits=True)
    except OSError as error:
        return Sink(fd, len).fail(error)  # ENXIO: the reader of the pipe has closed it already.
    return Sink(own, by_lines(lambda view: os.write(own, view)), waits=True)


def piece_of(view: memoryview, limit: int) -> memoryview:
    """The next part of `view` to write if other processes write there too: as many whole lines as fit into `limit`
    bytes, or one longer line, or all of it if no line ends."""
    if len(view) <= limit:
        return view
    end = bytes(view[:limit]).rfind(b"\n") + 1
    start, width = limit, limit
    while not end and start < len(view):
        found = bytes(view[start : start + width]).find(b"\n")
        end = start + found + 1 if found >= 0 else 0
        start, width = start + width, 2 * width
    return view[: end or len(view)]


def is_writable(fd: int) -> bool:
    """Whether a write of PIPE_BUF bytes would not block."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))


def _write_if_ready(fd: int, view: memoryview) -> int:
    if not is_writable(fd):
        raise BlockingIOError
    return os.write(fd, view[: select.PIPE_BUF])


def file_sink(path: str) -> Sink:
    """A sink that appends to a file; dead from the start if the file cannot be opened."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        sink = Sink(fd, lambda view: os.write(fd, view))
    except OSError as error:
        sink = Sink(-1, len).fail(error)
    sink.name = "the filtered log"
    return sink
