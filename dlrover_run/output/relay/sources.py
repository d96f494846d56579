"""What the relay reads from: outputs of workers (pipes and pseudo-terminals), and log files.

The agent holds the same open files, so their state is in the kernel: the bytes in a pipe, and the position in a log
file. Another relay continues where a killed one has stopped reading.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import termios
import time
from collections.abc import Callable

from dlrover_run.output.relay.lines import LineWriter
from dlrover_run.output.ring import RingWriter
from dlrover_run.output.sinks import Sink

READ_BYTES = 64 * 1024
"""Maximum bytes of one read: what it returns is lost if the relay is killed before it has written it."""

DRAIN_PIPE_BYTES = 2 * 1024 * 1024
"""Maximum bytes that `PipeSource.read_all` reads: more than a pipe holds, so only a live writer can have more."""


class Source:
    """Copies what is read to one sink (None: to none). Without `prefix` and `whole` the output is copied as it is; with
    one of them it is copied line by line, `prefix` before each. With `needles` only lines that contain one are copied.
    """

    def __init__(
        self,
        number: int,
        fd: int,
        sink: Sink | None,
        prefix: bytes | None = None,
        needles: tuple[bytes, ...] | None = None,
        *,
        whole: bool = False,
    ) -> None:
        self.number = number
        self.fd = fd
        """-1 once the output has ended."""
        self.sink = sink
        self.lines: LineWriter | None = None
        self.search: Callable[[bytes], None] | None = None
        """Called with all that is read, to find the steps of the worker."""
        if sink is not None and (prefix is not None or whole):
            self.lines = LineWriter(sink, prefix or b"", needles, keep_returns=prefix is None)

    @property
    def shown(self) -> bool:
        """Whether a sink takes the output."""
        return self.sink is not None and not self.sink.dead

    @property
    def has_room(self) -> bool:
        """Whether more may be read. A console that takes nothing makes its writers wait, as it would without a relay:
        first the relay does not read, then the pipe is full."""
        return self.sink is None or self.sink.has_room

    def take(self, data: bytes) -> None:
        """Pass on what was read."""
        if self.search is not None:
            self.search(data)
        if self.shown:
            self._put(data if self.lines is None else self.lines.feed(data, time.monotonic()))

    def show_unfinished(self, now: float) -> None:
        """Pass on an unfinished line whose source has been quiet for long enough. While the sink takes nothing the
        source is not read, so it is not known to be quiet: its time begins when there is room."""
        if self.lines is not None:
            if not self.has_room:
                self.lines.postpone(now)
            self._put(self.lines.unfinished(now))

    def finish(self) -> None:
        """The output has ended: complete its last line, and close the descriptor."""
        if self.lines is not None:
            self._put(self.lines.finish())
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _put(self, data: bytes) -> None:
        if self.sink is not None:
            self.sink.put(data, self.lines)


class PipeSource(Source):
    """The output of a worker: the reading end of a pipe, or the master of a pseudo-terminal. Its end is kept in `ring`.
    The launcher's own messages come through a pipe too.
    """

    def __init__(
        self,
        number: int,
        fd: int,
        ring: RingWriter | None,
        sink: Sink | None,
        poller: select.epoll,
        prefix: bytes | None = None,
        *,
        whole: bool = False,
    ) -> None:
        super().__init__(number, fd, sink, prefix, whole=whole)
        self.terminal = os.isatty(fd)
        self._ring = ring
        self._poller = poller
        self._watched = False

    def wait(self) -> None:
        """Register the pipe with the poller while it may be read."""
        wanted = self.fd >= 0 and self.has_room
        if wanted and not self._watched:
            self._poller.register(self.fd, select.EPOLLIN)
        elif self._watched and not wanted:
            self._poller.unregister(self.fd)
        self._watched = wanted

    def read(self, limit: int = READ_BYTES) -> int:
        """Read once, pass it on, and return the number of bytes; 0: none now, or none ever again."""
        if self.fd < 0:
            return 0
        try:
            data = os.read(self.fd, min(limit, READ_BYTES))
        except BlockingIOError:
            return 0
        except OSError:
            data = b""  # EIO: the last writer has closed the pseudo-terminal.
        if not data:
            self.close()
            return 0
        if self._ring is not None:
            self._ring.write(data)
        self.take(data)
        return len(data)

    def read_all(self) -> None:
        """Read all that the pipe holds now, also beyond the room that a stuck console leaves."""
        left = DRAIN_PIPE_BYTES
        while left > 0 and (count := self.read(left)):
            left -= count

    def close(self) -> None:
        """Read no more, and complete the last line."""
        if self._watched:
            # Closing is not enough: the agent has the same open file, so epoll would report it for ever.
            self._poller.unregister(self.fd)
            self._watched = False
        super().finish()

    def finish(self) -> None:
        self.close()
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def resize(self, size: bytes) -> None:
        """Give a pseudo-terminal the size of the console."""
        if size and self.terminal and self.fd >= 0:
            with contextlib.suppress(OSError):
                fcntl.ioctl(self.fd, termios.TIOCSWINSZ, size)


class LogSource(Source):
    """A log file, from the position on that its open file has, which the agent shares."""

    def __init__(
        self,
        number: int,
        fd: int,
        path: str,
        sink: Sink | None,
        prefix: bytes | None = None,
        needles: tuple[bytes, ...] | None = None,
    ) -> None:
        super().__init__(number, fd, sink, prefix, needles)
        self.path = path
        self.grown = True
        """Whether the file may hold more than was read."""
        self.watch = -1
        """The inotify watch of the file."""
        self.refused = False
        """Whether the last read failed."""
        self._position = 0

    @property
    def can_read(self) -> bool:
        """Whether there may be bytes to read, and room for them."""
        return self.grown and self.has_room

    def size(self) -> int:
        """Bytes in the file, 0 if it cannot be asked now."""
        with contextlib.suppress(OSError):
            return os.fstat(self.fd).st_size
        return 0

    def behind(self, goal: int) -> bool:
        """Whether there is more to read before `goal`. A file that was truncated never reaches it, but it ends."""
        return self.grown and self._position < goal and (self.sink is None or not self.sink.dead)

    def read(self) -> None:
        """Read once and pass it on."""
        data = b""
        self.refused = True
        # A log on a network file system that is gone must not end the relay: there are other logs.
        with contextlib.suppress(OSError):
            if self.shown or self.search is not None:
                data = self._read()
            else:
                os.lseek(self.fd, 0, os.SEEK_END)
            self._position = os.lseek(self.fd, 0, os.SEEK_CUR)
            self.refused = False
        self.grown = len(data) == READ_BYTES
        if data:
            self.take(data)

    def _read(self) -> bytes:
        data = os.read(self.fd, READ_BYTES)
        if not data and os.fstat(self.fd).st_size < os.lseek(self.fd, 0, os.SEEK_CUR):
            # Another program has truncated the file, as logrotate does with `copytruncate`: what the worker appends now
            # is at its beginning. What came since and is longer than the old content cannot be distinguished from more
            # of it.
            if self.lines is not None:
                self._put(self.lines.all_held())
            os.lseek(self.fd, 0, os.SEEK_SET)
            data = os.read(self.fd, READ_BYTES)
        return data


def window_size() -> bytes:
    """The size of the console's terminal, empty without one.

    Read with each copy: there is no SIGWINCH, because neither agent nor relay is in the console's session.
    """
    with contextlib.suppress(OSError):
        return fcntl.ioctl(2 if os.isatty(2) else 1, termios.TIOCGWINSZ, bytes(8))
    return b""
