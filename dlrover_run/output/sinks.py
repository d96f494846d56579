"""What the relay reads from and writes to: consoles, files, pipes and the kernel's word that a log file has grown.

The one rule: nothing here blocks the relay on a console. A console's open file is shared with the shell and with the
workers, so it cannot be made non-blocking; it is opened a second time instead, which gives an open file of our own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import stat
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dlrover_run.output.cursors import LINE_BEGUN, Cursor
from dlrover_run.output.lines import piece_of

READ_BYTES = 1024 * 1024
"""Bytes of one read: a whole pipe of the size that the agent makes."""

QUEUE_LIMIT = 4 * 1024 * 1024
"""Bytes waiting for a console above which its sources are no longer read."""

PROMPT_SECONDS = 0.1
"""How long a source must be quiet before its unfinished line is shown on a terminal.

A prompt has no newline, and the person who is asked must see it. `print` writes a text and its newline separately, so
with no delay at all lines of several workers would be joined.
"""

UNFINISHED_SECONDS = 2.0
"""The same for a console that is no terminal: nobody answers there, but what a worker that hangs wrote last counts."""

IN_MODIFY = 0x2
"""The inotify event for bytes written to a file."""

Write = Callable[[memoryview], int]
"""Writes some of the bytes and answers how many; raises BlockingIOError when the place takes none for now."""


class Recorder(Protocol):
    """What is told how far its bytes have got."""

    def record(self, mark: Cursor) -> None: ...


class Writer(Protocol):
    """What is told once its unfinished line has been followed by what another one has."""

    def interrupted(self) -> None: ...


@dataclass
class Segment:
    """What `source` has from byte `begin` to byte `end`, as it appears on a console, without the first `skip` bytes of
    that. `resumed` says what became of the line at `begin` if it had been begun before, as `Cursor.unfinished` does.
    """

    view: memoryview
    source: Recorder
    begin: int
    end: int
    skip: int
    resumed: int
    interrupts: Writer | None = None
    """Whose unfinished line it comes after."""

    @property
    def unfinished(self) -> bool:
        """Whether it ends within a line."""
        return bytes(self.view[-1:]) not in (b"\n", b"\r")


class Sink:
    """A place to write to, with a queue of what it has not taken yet.

    It is `dead` once writing fails for good: what is put into it then vanishes, and the sources go on.
    """

    def __init__(self, fd: int, write: Write, *, waits: bool = False) -> None:
        self.fd = fd
        self.waits = waits
        """Whether it can refuse bytes for now, so that one has to wait until it is writable."""
        self.put_bytes = 0
        self.written_bytes = 0
        self.error: OSError | None = None
        self.unfinished_after: float | None = None
        """Seconds for which a `LineWriter` holds an unfinished line back; None is until its end has come."""
        self.unfinished_by: Writer | None = None
        """The writer whose unfinished line is the last that was put; None where a line begins."""
        self._write = write
        self._queue: deque[Segment] = deque()
        self._regular = fd >= 0 and stat.S_ISREG(os.fstat(fd).st_mode)
        self._start = self._place() if self._regular else 0

    @property
    def dead(self) -> bool:
        return self.error is not None

    @property
    def pending(self) -> bool:
        return bool(self._queue)

    @property
    def has_room(self) -> bool:
        return self.put_bytes - self.written_bytes < QUEUE_LIMIT

    def put(self, part: Segment, writer: Writer | None = None) -> None:
        """Queue a part. `writer` is who says of himself when his last line is unfinished, None for one who does not."""
        if not part.view or self.dead:
            return
        if self.unfinished_by not in (None, writer):
            part.interrupts = self.unfinished_by
            if bytes(part.view[:1]) != b"\r":
                part.view = memoryview(b"\n" + part.view)
                part.skip -= 1
        self.unfinished_by = writer if part.unfinished else None
        self._queue.append(part)
        self.put_bytes += len(part.view)

    def flush(self) -> None:
        """Write what the place takes now."""
        while self._queue:
            part = self._queue[0]
            try:
                if self._regular:
                    # A signal that comes during the write ends the relay after it, before it is recorded.
                    part.source.record(Cursor(part.begin, max(0, part.skip), part.resumed, self._place() + 1))
                count = self._write(part.view)
            except BlockingIOError:
                return
            except OSError as error:
                self.fail(error)
                return
            # At once. Where the place is no file, the successor of a relay that is killed before this repeats it.
            if count == len(part.view):
                part.source.record(Cursor(part.end, 0, LINE_BEGUN if part.unfinished else 0))
                self._queue.popleft()
            else:
                part.skip += count
                part.view = part.view[count:]
                part.source.record(Cursor(part.begin, max(0, part.skip), part.resumed))
            if part.interrupts is not None and count:
                part.interrupts.interrupted()
                part.interrupts = None
            self.written_bytes += count

    def written_at(self, place: int, data: bytes) -> int:
        """How much of `data` a relay wrote to a file, at that place, that was killed before it recorded that: all that
        was there when this relay began, unless others write to the file too."""
        data = data[: max(0, self._start - place)]
        with contextlib.suppress(OSError):
            file = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                return len(data) if os.pread(file, len(data), place) == data else 0
            finally:
                os.close(file)
        return 0

    def _place(self) -> int:
        """Where the next write to a file goes."""
        appends = fcntl.fcntl(self.fd, fcntl.F_GETFL) & os.O_APPEND
        return os.fstat(self.fd).st_size if appends else os.lseek(self.fd, 0, os.SEEK_CUR)

    def fail(self, error: OSError) -> None:
        """Give the place up: drop what waits for it."""
        self.error = error
        self._queue.clear()
        self.written_bytes = self.put_bytes

    def close(self) -> None:
        """Let the descriptor go; nothing may be put into it any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def console_sink(fd: int, *, shared: bool = False) -> Sink:
    """The sink for one of our own standard descriptors, whatever is behind it.

    Where it is `shared` with the relays of other nodes, it is given whole lines, and no more bytes of them than a pipe
    takes all at once or not at all: a part of a line that found room would be followed by a line of another node. For a
    line that is longer than that, and on a terminal, which promises nothing, this holds only while there is room.
    """
    sink = _console_sink(fd, shared)
    if not shared:
        # Relays of other nodes do not know whose line is unfinished.
        sink.unfinished_after = PROMPT_SECONDS if sink.fd >= 0 and os.isatty(sink.fd) else UNFINISHED_SECONDS
    return sink


def _console_sink(fd: int, shared: bool) -> Sink:
    try:
        mode = os.fstat(fd).st_mode
    except OSError as error:
        return _failed(fd, error)
    cut = _by_lines if shared else _as_it_is
    if stat.S_ISSOCK(mode):
        connection = socket.socket(fileno=os.dup(fd))
        return Sink(connection.fileno(), cut(lambda view: connection.send(view, socket.MSG_DONTWAIT)), waits=True)
    if not stat.S_ISFIFO(mode) and not os.isatty(fd):
        # A regular file or /dev/null takes everything. It is not opened again: the file position is shared on purpose.
        return Sink(fd, lambda view: os.write(fd, view))
    try:
        own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (PermissionError, FileNotFoundError):
        # Another user's terminal (after `su`), or no /proc: write as little as a writable pipe is sure to take.
        return Sink(fd, cut(lambda view: _write_a_little(fd, view)), waits=True)
    except OSError as error:
        return _failed(fd, error)  # ENXIO: the reader of the pipe is gone already.
    return Sink(own, cut(lambda view: os.write(own, view)), waits=True)


def _as_it_is(write: Write) -> Write:
    return write


def _by_lines(write: Write) -> Write:
    return lambda view: write(piece_of(view, select.PIPE_BUF))


def _write_a_little(fd: int, view: memoryview) -> int:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    if not poll.poll(0):
        raise BlockingIOError
    return os.write(fd, view[: select.PIPE_BUF])


def _failed(fd: int, error: OSError) -> Sink:
    sink = Sink(fd, len)
    sink.fail(error)
    return sink


def file_sink(path: str) -> Sink:
    """A sink that appends to a file; dead from the start when the file cannot be opened."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        return _failed(-1, error)
    return Sink(fd, lambda view: os.write(fd, view))


class Inotify:
    """The kernel's word that a watched file has been written to. Raises `OSError` when the kernel has none to spare."""

    def __init__(self) -> None:
        # Here, because only the relay of a job that tees needs it and it costs the start of every process some time.
        import ctypes

        self._libc = ctypes.CDLL(None, use_errno=True)
        self._errno = ctypes.get_errno
        self.fd = self._checked(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def _checked(self, result: int) -> int:
        if result < 0:
            number = self._errno()
            raise OSError(number, os.strerror(number))
        return result

    def watch(self, path: str) -> int:
        """Watch a file; the number that names it in `changed`, the same for the same file."""
        return self._checked(self._libc.inotify_add_watch(self.fd, os.fsencode(path), IN_MODIFY))

    def forget(self, watch: int) -> None:
        self._libc.inotify_rm_watch(self.fd, watch)

    def changed(self) -> set[int] | None:
        """The files written to since the last call; None when the kernel lost count, so that it may be any."""
        numbers: set[int] = set()
        try:
            data = os.read(self.fd, READ_BYTES // 16)
        except BlockingIOError:
            return numbers
        position = 0
        while position < len(data):
            number, _, _, length = struct.unpack_from("iIII", data, position)
            if number < 0:
                return None
            numbers.add(number)
            position += struct.calcsize("iIII") + length
        return numbers
