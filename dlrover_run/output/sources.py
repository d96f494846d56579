"""What the relay reads from: log files, and outputs of workers (pipes that are emptied into memory files).

The output that is shown of a source follows from its file and from its cursor alone. So the successor of a killed relay
continues exactly where the relay was killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import termios
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dlrover_run.output.cursors import LINE_BEGUN, LINE_INTERRUPTED, Cursor, CursorTable, release_memory
from dlrover_run.output.lines import LineWriter
from dlrover_run.output.sinks import Segment, Sink
from dlrover_run.output.streams import TAIL_BYTES

if TYPE_CHECKING:
    from dlrover_run.output.log_steps import LogSteps

READ_BYTES = 1024 * 1024
"""Bytes of one read: a whole pipe of the size that the agent makes."""

DRAIN_PIPE_BYTES = 2 * 1024 * 1024
"""Maximum bytes that `fill_all` reads: more than a pipe holds, so only a live writer can have more."""

PAGE = 4096


class Source:
    """Copies a file to one sink (None: to none). Without `prefix` and `whole` the output is copied as it is; with one
    of them it is copied line by line, `prefix` before each. With `needles` only lines that contain one are copied.
    """

    def __init__(
        self,
        number: int,
        fd: int,
        sink: Sink | None,
        cursors: CursorTable,
        prefix: bytes | None,
        needles: tuple[bytes, ...] | None = None,
        *,
        whole: bool = False,
    ) -> None:
        self.number = number
        self.path = ""
        """The path of a log file, empty for the output of a worker."""
        self.sink = sink
        self.grown = True
        """Whether the file may hold more than was read."""
        self.watch = -1
        """The inotify watch of a log file."""
        self.refused = False
        """Whether the last read failed."""
        self.lines: LineWriter | None = None
        self.steps: LogSteps | None = None
        """Searches what is read for the steps of the worker."""
        self._fd = fd
        self._cursors = cursors
        cursor = cursors.get(number)
        self._skip, self._writing = cursor.skip, cursor.writing
        self._found = 0
        """Bytes that the predecessor's last write has added to the sink's file, as far as they were compared."""
        self._freed = self.offset = self._queued = cursor.offset
        if sink is not None and (prefix is not None or whole):
            keeps = prefix is None
            after_return = not keeps and self.offset > 0 and os.pread(fd, 1, self.offset - 1) == b"\r"
            self.lines = LineWriter(
                sink,
                prefix or b"",
                needles,
                cursor,
                keep_returns=keeps,
                after_return=after_return,
                on_interrupted=self._interrupted,
            )

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    @property
    def can_copy(self) -> bool:
        """Whether there may be bytes to read, and room for them."""
        return self.grown and (self.sink is None or self.sink.has_room)

    def behind(self, goal: int) -> bool:
        """Whether there is more to read before `goal`. A file that was truncated never reaches it, but it ends."""
        return self.grown and self.offset < goal and (self.sink is None or not self.sink.dead)

    def copy(self) -> None:
        """Read once and pass on what can be shown."""
        data = b""
        shown = self.sink is not None and not self.sink.dead
        # A log on a network file system that is gone must not end the relay: there are other logs.
        self.refused = True
        with contextlib.suppress(OSError):
            if shown or self.steps is not None:
                data = os.pread(self._fd, READ_BYTES, self.offset)
                if not data and self.path and self.size() < self.offset:
                    self._begin_again()
                    data = os.pread(self._fd, READ_BYTES, 0)
            else:
                # Nothing will be shown, so the memory of all output can be released.
                self.offset = self.size()
            self.refused = False
        begin, resumed = self._shown_to, self.lines.resumed if self.lines is not None else 0
        self.offset += len(data)
        self.grown = len(data) == READ_BYTES
        if self.steps is not None:
            self.steps.feed(data)
        if not shown:
            self.record(Cursor(self.offset, 0))
        else:
            self._put(data if self.lines is None else self.lines.feed(data, time.monotonic()), begin, resumed)

    def _begin_again(self) -> None:
        """Another program has truncated the log file, as logrotate does with `copytruncate`: what the worker appends
        now is at its beginning. What came since and is longer than the old content cannot be told from more of it."""
        self._show(LineWriter.all_held)
        self.offset = self._queued = self._skip = 0

    def resume(self) -> None:
        """Queue the rest of the write in which the predecessor was killed, or record that there is none.

        Called before anything is written to the sink, so only one of its sources can have such a write.
        """
        cursor = self._cursors.get(self.number)
        if self.sink is None or not (cursor.skip or cursor.writing):
            return
        before = self.sink.put_bytes
        while self.grown and self.sink.put_bytes == before:
            self.copy()
        rest = self._skip > 0 or 0 < self._writing <= self.sink.start
        if self.sink.put_bytes == before and rest:
            # An unfinished line was shown, or was completed with a newline at the end of the output.
            self._show(LineWriter.all_held)
        if self.sink.put_bytes == before and rest and self.lines is not None and self.lines.resumes:
            completed = 0 < self._writing <= self.sink.start
            self.sink.unfinished_by = None if completed else self.lines
            self.record(Cursor(self._shown_to, 0, LINE_INTERRUPTED if completed else LINE_BEGUN))
            self._writing = 0
        elif self.sink.put_bytes == before and cursor.writing and not rest:
            self.record(cursor._replace(skip=cursor.skip + self._found, writing=0))
            self._writing = 0

    def show_unfinished(self, now: float) -> None:
        self._show(lambda lines: lines.unfinished(now))

    def _show(self, take: Callable[[LineWriter], bytes]) -> None:
        """Pass on what `take` releases of the held lines."""
        if self.lines is not None:
            begin, resumed = self._shown_to, self.lines.resumed
            self._put(take(self.lines), begin, resumed)

    def finish(self) -> None:
        self._show(LineWriter.finish)
        os.close(self._fd)
        # Output that is still queued is recorded later, when the number may be that of another source's file.
        self._fd = -1

    def record(self, cursor: Cursor) -> None:
        self._cursors.put(self.number, cursor)

    @property
    def _shown_to(self) -> int:
        """The offset of the first byte that was not passed on."""
        return self.offset - (self.lines.held if self.lines is not None else 0)

    def _interrupted(self) -> None:
        cursor = self._cursors.get(self.number)
        if cursor.unfinished == LINE_BEGUN:
            self.record(cursor._replace(unfinished=LINE_INTERRUPTED))

    def _put(self, shown: bytes, begin: int, resumed: int) -> None:
        if self.sink is None:
            return
        skip = min(self._skip, len(shown))
        if self._writing and len(shown) > skip:
            written = self.sink.written_at(self._writing - 1, shown[skip:] if skip >= 0 else b"\n" + shown)
            other = self.sink.unfinished_by
            if written and other is not None and other is not self.lines:
                other.interrupted()
                self.sink.unfinished_by = None
            self._writing = self._writing + written if written else 0
            self._found += written
            skip += written
            self._skip += written
        self._skip -= skip
        skip = max(0, skip)
        segment = Segment(memoryview(shown)[skip:], self, begin, self._shown_to, skip, resumed)
        if segment.view:
            self._queued = segment.end
        self.sink.put(segment, self.lines)


class PipeSource(Source):
    """The output of a worker: the reading end of a pipe (or the master of a pseudo-terminal), and the memory file into
    which it is emptied. The agent holds both too, so that they outlive a relay.

    `pipe` is -1 once the output has ended. The file holds all that the worker wrote, except that memory which is not
    needed any more is returned to the kernel. A file that can take no more (`ulimit -f` limits its size even where its
    memory was returned) is truncated to 0 once all of it has been shown; until then the worker waits, as it would for a
    slow console.
    """

    def __init__(
        self,
        number: int,
        spool: int,
        pipe: int,
        sink: Sink | None,
        cursors: CursorTable,
        poller: select.epoll,
        prefix: bytes | None = None,
        *,
        whole: bool = False,
    ) -> None:
        if cursors.get(number).offset > os.fstat(spool).st_size:
            # The file was truncated, and the relay was killed before it had recorded that.
            cursors.put(number, Cursor(0, 0, cursors.get(number).unfinished))
        super().__init__(number, spool, sink, cursors, prefix, whole=whole)
        self.pipe = pipe
        self.terminal = pipe >= 0 and os.isatty(pipe)
        self._end = self.size()
        self.lost: OSError | None = None
        """The error for which output was dropped: not even an empty file takes it."""
        self._full = False
        self._read = b""
        """Bytes that were read from the pipe and are not in the file."""
        self._before = b""
        """The end of the file's content before it was truncated."""
        self._poller = poller
        self._watched = False

    def wait(self) -> None:
        """Register the pipe with the poller or not: a console that takes nothing makes its writers wait, as it would
        without a relay."""
        wanted = self.pipe >= 0 and not self._full and (self.sink is None or self.sink.has_room)
        if wanted and not self._watched:
            self._poller.register(self.pipe, select.EPOLLIN)
        elif self._watched and not wanted:
            self._poller.unregister(self.pipe)
        self._watched = wanted

    def fill(self, most: int = READ_BYTES) -> int:
        """Move the pipe's content into the file and return the number of bytes; 0: none now, or none ever again."""
        if self.pipe < 0 or self._full:
            return 0
        try:
            count = self._move(most)
        except BlockingIOError:
            return 0
        except OSError as error:
            if not (self.terminal and error.errno == errno.EIO):
                self._file_is_full(error)
                return 0
            count = 0  # EIO: the last writer has closed the pseudo-terminal.
        if not count:
            self.close()
            return 0
        self._end += count
        self.grown = True
        return count

    def fill_all(self) -> None:
        """Move all that the pipe holds now into the file."""
        left = DRAIN_PIPE_BYTES
        while left > 0 and (count := self.fill(left)):
            left -= count

    def _move(self, most: int) -> int:
        if not self.terminal:
            # In the kernel: no byte leaves the pipe without being in the file, so none is lost if the relay is killed.
            return os.splice(self.pipe, self._fd, most, offset_dst=self._end)
        self._read = self._read or os.read(self.pipe, most)
        return self._store()

    def _store(self) -> int:
        count = os.pwrite(self._fd, self._read, self._end)
        self._read = self._read[count:]
        return count

    def _file_is_full(self, error: OSError) -> None:
        if self._end:
            self._full = self.grown = True
            return
        # Output that can never be stored is dropped, so that the worker does not wait for ever.
        self.lost = error
        with contextlib.suppress(BlockingIOError):
            if not self._read and not os.read(self.pipe, READ_BYTES):
                self.close()
        self._read = b""

    def _truncate(self) -> None:
        """Empty a full file, if all of it has been shown."""
        cursor = self._cursors.get(self.number)
        if not self._full or self.grown or self._shown_to < self._end or cursor.offset < self._queued:
            return
        self._before = (self._before + os.pread(self._fd, TAIL_BYTES, max(0, self._end - TAIL_BYTES)))[-TAIL_BYTES:]
        # In this order: a successor then sees a cursor beyond the end, and not the old output once more.
        os.ftruncate(self._fd, 0)
        self._full = False
        self._freed = self.offset = self._queued = self._end = 0
        self.record(Cursor(0, 0, cursor.unfinished))
        if self._read:
            try:
                self._end = self._store()
                self.grown = True
                self._full = bool(self._read)
            except OSError as error:
                self._file_is_full(error)

    def behind(self, goal: int) -> bool:
        return super().behind(goal) or bool(
            self._read and not (self.sink is not None and (self.sink.dead or self.sink.postponed))
        )

    def record(self, cursor: Cursor) -> None:
        super().record(cursor)
        if self._fd < 0:
            return
        unused = min(cursor.offset, self.offset - TAIL_BYTES) // PAGE * PAGE
        if unused - self._freed >= READ_BYTES:
            release_memory(self._fd, self._freed, unused - self._freed)
            self._freed = unused
        self._truncate()

    def copy(self) -> None:
        super().copy()
        if self._full and not self.grown:
            self._show(LineWriter.all_held)
        self._truncate()
        if self.pipe < 0 and not self.grown and not self._read:
            self._show(LineWriter.finish)

    def tail(self) -> tuple[bytes, bool]:
        """The end of what the worker wrote, and whether there was more before it."""
        start = max(0, self._end - TAIL_BYTES)
        text = self._before + os.pread(self._fd, TAIL_BYTES, start)
        return text[-TAIL_BYTES:], start > 0 or len(text) > TAIL_BYTES or bool(self._before)

    def close(self) -> None:
        if self.pipe < 0:
            return
        if self._watched:
            # Closing is not enough: the agent has the same open file, so epoll would report it for ever.
            self._poller.unregister(self.pipe)
            self._watched = False
        if self._full:
            with contextlib.suppress(OSError):
                while len(self._read) < 2 * READ_BYTES and (data := os.read(self.pipe, READ_BYTES)):
                    self._read += data
        os.close(self.pipe)
        self.pipe = -1
        self.grown = True

    def resize(self, size: bytes) -> None:
        """Give a pseudo-terminal the size of the console."""
        if size and self.terminal and self.pipe >= 0:
            with contextlib.suppress(OSError):
                fcntl.ioctl(self.pipe, termios.TIOCSWINSZ, size)


def window_size() -> bytes:
    """The size of the console's terminal, empty without one.

    Read with each copy: there is no SIGWINCH, because neither agent nor relay is in the console's session.
    """
    with contextlib.suppress(OSError):
        return fcntl.ioctl(2 if os.isatty(2) else 1, termios.TIOCGWINSZ, bytes(8))
    return b""
