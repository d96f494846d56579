"""What the relay reads from and writes to: consoles, files, pipes and the kernel's word that a log file has grown.

The one rule: nothing here blocks the relay on a console. A console's open file is shared with the shell and with the
workers, so it cannot be made non-blocking; it is opened a second time instead, which gives an open file of our own.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Callable

from dlrover_run.output.relay_lines import LineCutter, Ring, matching, piece_of, prefixed

CHUNK = 1024 * 1024
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
        self.unfinished_by: object = None
        """The writer whose unfinished line is the last that was put; None where a line begins."""
        self._write = write
        self._queue: deque[memoryview] = deque()

    @property
    def dead(self) -> bool:
        return self.error is not None

    @property
    def pending(self) -> bool:
        return bool(self._queue)

    @property
    def has_room(self) -> bool:
        return self.put_bytes - self.written_bytes < QUEUE_LIMIT

    def put(self, data: bytes, writer: object = None) -> None:
        if data and not self.dead:
            if self.unfinished_by not in (None, writer) and not data.startswith(b"\r"):
                data = b"\n" + data
            self.unfinished_by = None if data.endswith((b"\n", b"\r")) else writer
            self._queue.append(memoryview(data))
            self.put_bytes += len(data)

    def flush(self) -> None:
        """Write what the place takes now."""
        while self._queue:
            view = self._queue[0]
            try:
                count = self._write(view)
            except BlockingIOError:
                return
            except OSError as error:
                self.fail(error)
                return
            self.written_bytes += count
            if count == len(view):
                self._queue.popleft()
            else:
                self._queue[0] = view[count:]

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


class LineWriter:
    """Passes the output of one source on to a sink in whole lines, because other sources write there too.

    An unfinished line is shown once its source has been quiet for the sink's `unfinished_after` seconds, if no other
    unfinished line stands there. What another source writes after it begins a new line. The last line is completed
    when the output ends. With `needles` only lines that contain one of them are passed on.
    """

    def __init__(
        self,
        sink: Sink,
        prefix: bytes = b"",
        needles: tuple[bytes, ...] | None = None,
        *,
        keep_returns: bool = False,
    ) -> None:
        self._sink = sink
        self._prefix = prefix
        self._needles = needles
        self._cutter = LineCutter(keep_returns=keep_returns)
        self._due: float | None = None
        self._shown = False
        """Whether the beginning of the line that comes next was shown already."""

    @property
    def due(self) -> float | None:
        """When the unfinished line is to be shown if nothing more comes; None when there is none, or while it would
        stand behind another one."""
        return self._due if self._sink.unfinished_by is None or self._sink.unfinished_by is self else None

    def feed(self, data: bytes, now: float) -> None:
        """Pass on what makes whole lines, and hold back the rest."""
        if not data:
            return
        self._put(self._cutter.feed(data))
        after = self._sink.unfinished_after
        self._due = now + after if self._cutter.unfinished and after is not None else None

    def show_unfinished(self, now: float) -> None:
        """Show the unfinished line if it is due."""
        if self.due is None or now < self.due:
            return
        self._due = None
        text = self._cutter.take_unfinished()
        self._sink.put(text if self._sink.unfinished_by is self else self._prefix + text, self)
        self._shown = True

    def finish(self) -> None:
        """Complete the unfinished line, because the output has ended."""
        self._due = None
        self._put(self._cutter.finish())
        if self._sink.unfinished_by is self:
            self._sink.put(b"\n", self)

    def _put(self, lines: bytes) -> None:
        if not lines:
            return
        if self._needles is not None:
            lines = matching(lines, self._needles)
        continued = self._sink.unfinished_by is self
        if self._shown and not continued and lines.startswith(b"\n"):
            # Another writer has ended the line that this newline belongs to.
            lines = lines[1:]
        self._shown = False
        self._sink.put(prefixed(lines, self._prefix)[len(self._prefix) if continued else 0 :], self)


class Pipe:
    """The reading end of one output of a worker: a pipe, or the master of a pseudo-terminal.

    The sink gets the bytes as they come, or by way of `lines`. The ring has what the worker wrote, in either case.
    After its end `fd` is -1 and its ring stays.
    """

    def __init__(
        self, key: str, fd: int, sink: Sink | None, poller: select.epoll, lines: LineWriter | None = None
    ) -> None:
        self.key = key
        self.fd = fd
        self.ring = Ring()
        self.terminal = os.isatty(fd)
        self._sink = sink
        self.lines = lines
        self._poller = poller
        self._watched = False

    def watch(self) -> None:
        """Wait for its bytes or not: a console that takes nothing makes its writers wait, as without a relay."""
        wanted = self.fd >= 0 and (self._sink is None or self._sink.has_room)
        if wanted and not self._watched:
            self._poller.register(self.fd, select.EPOLLIN)
        elif self._watched and not wanted:
            self._poller.unregister(self.fd)
        self._watched = wanted

    def take(self, most: int = CHUNK) -> int:
        """Read once and pass on; the count of bytes, 0 when there is nothing now or never again."""
        if self.fd < 0:
            return 0
        try:
            data = os.read(self.fd, most)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""  # EIO is how a pseudo-terminal says that its last writer has closed it.
        if not data:
            self.close()
            return 0
        self.ring.add(data)
        if self.lines is not None:
            self.lines.feed(data, time.monotonic())
        elif self._sink is not None:
            self._sink.put(data)
        return len(data)

    def close(self) -> None:
        if self.fd < 0:
            return
        if self.lines is not None:
            self.lines.finish()
        if self._watched:
            # Closing is not enough: the agent has the same open file, so epoll would go on speaking of it for ever.
            self._poller.unregister(self.fd)
            self._watched = False
        os.close(self.fd)
        self.fd = -1


class Tail:
    """One log file on its way to one sink: to the console, or its matching lines to the filtered file.

    The first `start` bytes of it are left out.
    """

    def __init__(self, path: str, sink: Sink, prefix: bytes, needles: tuple[bytes, ...] | None, start: int = 0) -> None:
        self.path = path
        self.sink = sink
        self.offset = start
        self.grown = True
        """Whether the file may hold more than was read."""
        self.watch = -1
        self.lines = LineWriter(sink, prefix, needles)
        # The order in which the worker's end and ours open the file does not matter, so either may create it.
        self._fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if start:
            os.lseek(self._fd, start, os.SEEK_SET)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    @property
    def can_copy(self) -> bool:
        return self.grown and self.sink.has_room

    def behind(self, goal: int) -> bool:
        """Whether there is more to read before `goal`; a file that was cut short does not get there, but it ends."""
        return self.grown and self.offset < goal and not self.sink.dead

    def copy(self) -> None:
        """Read once and pass on the lines that are whole."""
        data = b""
        if not self.sink.dead:
            # A log on a network that has gone is no reason to end: the other logs are still there.
            with contextlib.suppress(OSError):
                data = os.read(self._fd, CHUNK)
        self.offset += len(data)
        self.grown = len(data) == CHUNK
        self.lines.feed(data, time.monotonic())

    def finish(self) -> None:
        """Pass on the unfinished line that is left and let the file go."""
        self.lines.finish()
        os.close(self._fd)


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
            data = os.read(self.fd, CHUNK // 16)
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
