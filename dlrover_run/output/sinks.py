"""What the relay writes to: the console's descriptors and filtered log files.

No write may block the relay. The open file of a console is shared with the shell and with the workers, so it cannot be
made non-blocking; the relay opens it a second time, which gives it an open file of its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import stat
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlrover_run.output.cursors import LINE_BEGUN, Cursor

if TYPE_CHECKING:
    from dlrover_run.output.lines import LineWriter
    from dlrover_run.output.sources import Source

QUEUE_LIMIT = 4 * 1024 * 1024
"""Bytes queued for a console above which its sources are no longer read."""

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
"""The same for a console that is no terminal: there is no prompt to answer, but the last output of a worker that hangs
matters."""

Write = Callable[[memoryview], int]
"""Writes some of the bytes and returns how many; raises BlockingIOError when none can be written now."""


@dataclass
class Segment:
    """The output of `source` for its bytes from `begin` to `end`, without the first `skip` bytes of that output.
    `resumed` is the state of the line at `begin` if its beginning was shown before, as in `Cursor.unfinished`.
    """

    view: memoryview
    source: Source
    begin: int
    end: int
    skip: int
    resumed: int
    interrupts: LineWriter | None = None
    """The writer whose unfinished line is followed by this segment."""

    @property
    def unfinished(self) -> bool:
        return bytes(self.view[-1:]) not in (b"\n", b"\r")


class Sink:
    """A descriptor to write to, with a queue of what it has not taken yet.

    It is `dead` once a write has failed for good: what is put into it is then dropped, and the sources go on. After one
    of the errors PASSING of a file it is `postponed`: it is tried again, and keeps the last QUEUE_LIMIT bytes
    meanwhile, so that no worker waits for the disk. A line says how much is missing.
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
        self.unfinished_by: LineWriter | None = None
        """The writer whose unfinished line was put last; None at the beginning of a line."""
        self._write = write
        self._queue: deque[Segment] = deque()
        self._lost = 0
        self._notice = b""
        self._regular = fd >= 0 and stat.S_ISREG(os.fstat(fd).st_mode)
        self.start = self._position() if self._regular else 0
        """The position of the file before this relay wrote to it."""

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

    def put(self, segment: Segment, writer: LineWriter | None = None) -> None:
        """Queue a segment. `writer` is its `LineWriter`, None for output that is not cut into lines."""
        if not segment.view or self.dead:
            return
        if self.unfinished_by not in (None, writer):
            segment.interrupts = self.unfinished_by
            if bytes(segment.view[:1]) != b"\r":
                segment.view = memoryview(b"\n" + segment.view)
                segment.skip -= 1
        self.unfinished_by = writer if segment.unfinished else None
        self._queue.append(segment)
        self.put_bytes += len(segment.view)
        while self.postponed and self.put_bytes - self.written_bytes > QUEUE_LIMIT and len(self._queue) > 1:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        segment = self._queue.popleft()
        segment.source.record(Cursor(segment.end, 0, LINE_BEGUN if segment.unfinished else 0))
        self.written_bytes += len(segment.view)
        self._lost += len(segment.view)

    def flush(self) -> None:
        """Write what the descriptor takes now."""
        if self.retry_at is not None and time.monotonic() < self.retry_at:
            return
        if self._lost and not self._notice:
            self._notice = f"\n... {self._lost} bytes of output are missing here: the file took none ...\n".encode()
            self._lost = 0
        while self._queue:
            segment = self._queue[0]
            try:
                while self._notice:
                    self._notice = self._notice[self._write(memoryview(self._notice)) :]
                if self._regular:
                    # A signal during the write kills the relay before it is recorded, after all of it or a part.
                    start = self._position() + 1
                    segment.source.record(Cursor(segment.begin, segment.skip, segment.resumed, start))
                count = self._write(segment.view)
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
            if segment.interrupts is not None and count:
                # Recorded first: from the other record a successor can tell that this one was due.
                segment.interrupts.interrupted()
                segment.interrupts = None
            # Recorded at once. If the relay is killed before, its successor repeats the write (unless to a file).
            if count == len(segment.view):
                segment.source.record(Cursor(segment.end, 0, LINE_BEGUN if segment.unfinished else 0))
                self._queue.popleft()
            else:
                segment.skip += count
                segment.view = segment.view[count:]
                segment.source.record(Cursor(segment.begin, max(0, segment.skip), segment.resumed))
            self.written_bytes += count

    def written_at(self, position: int, data: bytes) -> int:
        """How many bytes of `data` stand at that position of the file, written by a relay that was killed before it
        recorded the write. All or none: if other programs write to the file too, the bytes there may differ."""
        data = data[: max(0, self.start - position)]
        with contextlib.suppress(OSError):
            file = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                return len(data) if os.pread(file, len(data), position) == data else 0
            finally:
                os.close(file)
        return 0

    def _position(self) -> int:
        appends = fcntl.fcntl(self.fd, fcntl.F_GETFL) & os.O_APPEND
        return os.fstat(self.fd).st_size if appends else os.lseek(self.fd, 0, os.SEEK_CUR)

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
