"""What the relay reads from: a log file, or the pipe of a worker's output by way of a memory file.

What is shown of a source follows from its file and from its record in `relay_marks`. So another relay goes on exactly
where one was killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import time
from collections.abc import Callable

from dlrover_run.output.cursors import LINE_BEGUN, LINE_INTERRUPTED, Cursor, CursorTable, release_memory
from dlrover_run.output.lines import LineCutter, matching, prefixed
from dlrover_run.output.sinks import READ_BYTES, Segment, Sink
from dlrover_run.output.streams import TAIL_BYTES

PAGE = 4096


class LineWriter:
    """Makes whole lines of the output of one source, because other sources write to its sink too.

    An unfinished line is shown once its source has been quiet for the sink's `unfinished_after` seconds, if no other
    unfinished line stands there. What another source writes after it begins a new line. The last line is completed
    when the output ends. With `needles` only lines that contain one of them are passed on. `mark` is where a relay left
    off that was killed; the byte before that was a carriage return if it was `after_return`. `on_interrupted` is called
    once another source has been shown after the unfinished line.
    """

    def __init__(
        self,
        sink: Sink,
        prefix: bytes,
        needles: tuple[bytes, ...] | None,
        mark: Cursor,
        *,
        keep_returns: bool = False,
        after_return: bool = False,
        on_interrupted: Callable[[], None] = lambda: None,
    ) -> None:
        self._sink = sink
        self.interrupted = on_interrupted
        self._prefix = prefix
        self._needles = needles
        self._cutter = LineCutter(keep_returns=keep_returns, after_return=after_return)
        self._due: float | None = None
        self.resumes = bool(mark.unfinished)
        """Whether the beginning of the line that comes next was shown already."""
        if mark.unfinished == LINE_BEGUN and sink.unfinished_by is None:
            sink.unfinished_by = self

    @property
    def held(self) -> int:
        """Bytes of the source that are held back."""
        return self._cutter.held

    @property
    def resumed(self) -> int:
        """What became of the line whose beginning was shown, as `Cursor.unfinished` says it."""
        return (LINE_BEGUN if self._sink.unfinished_by is self else LINE_INTERRUPTED) if self.resumes else 0

    @property
    def due(self) -> float | None:
        """When the unfinished line is to be shown if nothing more comes; None when there is none, or while it would
        stand behind another one."""
        return self._due if self._sink.unfinished_by is None or self._sink.unfinished_by is self else None

    def feed(self, data: bytes, now: float) -> bytes:
        """What can be shown with the next bytes of the source; the rest is held back."""
        if not data:
            return b""
        shown = self._shown(self._cutter.feed(data))
        after = self._sink.unfinished_after
        self._due = now + after if self._cutter.held and after is not None else None
        return shown

    def unfinished(self, now: float) -> bytes:
        """The unfinished line if it is due."""
        return self.all_held() if self.due is not None and now >= self.due else b""

    def all_held(self) -> bytes:
        """What is held back, though it is not due; what follows is the rest of that line."""
        if not self._cutter.held:
            return b""
        self._due = None
        text = self._cutter.take_unfinished()
        self.resumes = True
        return text if self._sink.unfinished_by is self else self._prefix + text

    def finish(self) -> bytes:
        """What completes the unfinished line, because the output has ended."""
        self._due = None
        shown = self._shown(self._cutter.finish())
        return shown or (b"\n" if self._sink.unfinished_by is self else b"")

    def _shown(self, lines: bytes) -> bytes:
        if not lines:
            return b""
        if self._needles is not None:
            lines = matching(lines, self._needles)
        continued = self._sink.unfinished_by is self
        if self.resumes and not continued and lines.startswith(b"\n"):
            # Another writer has ended the line that this newline belongs to.
            lines = lines[1:]
        self.resumes = False
        return prefixed(lines, self._prefix)[len(self._prefix) if continued else 0 :]


class Source:
    """Output on its way from a file to one sink, None for nowhere: as it is where `prefix` is None and it is not to be
    in `whole` lines, else line by line with `prefix` before each; with `needles` only lines that contain one of them.
    """

    def __init__(
        self,
        number: int,
        fd: int,
        sink: Sink | None,
        marks: CursorTable,
        prefix: bytes | None,
        needles: tuple[bytes, ...] | None = None,
        *,
        whole: bool = False,
    ) -> None:
        self.number = number
        self.path = ""
        self.sink = sink
        self.grown = True
        """Whether the file may hold more than was read."""
        self.watch = -1
        self.lines: LineWriter | None = None
        self._fd = fd
        self._marks = marks
        mark = marks.get(number)
        self._skip, self._writing = mark.skip, mark.writing
        self._freed = self.offset = self._queued = mark.position
        if sink is not None and (prefix is not None or whole):
            keeps = prefix is None
            after_return = not keeps and self.offset > 0 and os.pread(fd, 1, self.offset - 1) == b"\r"
            self.lines = LineWriter(
                sink,
                prefix or b"",
                needles,
                mark,
                keep_returns=keeps,
                after_return=after_return,
                on_interrupted=self._interrupted,
            )

    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._fd).st_size

    @property
    def can_copy(self) -> bool:
        """Whether there may be bytes to read, and room for them."""
        return self.grown and (self.sink is None or self.sink.has_room)

    def behind(self, goal: int) -> bool:
        """Whether there is more to read before `goal`; a file that was cut short does not get there, but it ends."""
        return self.grown and self.offset < goal and (self.sink is None or not self.sink.dead)

    def copy(self) -> None:
        """Read once and pass on what can be shown."""
        data, begin = b"", self._shown_to
        resumed = self.lines.resumed if self.lines is not None else 0
        if self.sink is None or self.sink.dead:
            self._pass_over()
        else:
            # A log on a network that has gone is no reason to end: the other logs are still there.
            with contextlib.suppress(OSError):
                data = os.pread(self._fd, READ_BYTES, self.offset)
        self.offset += len(data)
        self.grown = len(data) == READ_BYTES
        self._put(data if self.lines is None else self.lines.feed(data, time.monotonic()), begin, resumed)

    def _pass_over(self) -> None:
        """Take all for shown, since nobody will see it: its memory can be given back."""
        with contextlib.suppress(OSError):
            self.offset = self.size()
        self.record(Cursor(self.offset, 0))

    def show_unfinished(self, now: float) -> None:
        """Show the line that has no end yet if it is due."""
        if self.lines is not None:
            begin, resumed = self._shown_to, self.lines.resumed
            self._put(self.lines.unfinished(now), begin, resumed)

    def complete(self) -> None:
        """Complete the line that has no end yet, because nothing more comes."""
        if self.lines is not None:
            begin, resumed = self._shown_to, self.lines.resumed
            self._put(self.lines.finish(), begin, resumed)

    def finish(self) -> None:
        """Complete the last line and let the file go."""
        self.complete()
        os.close(self._fd)
        # What the console has not taken yet is still recorded, and by then the number may be another source's file.
        self._fd = -1

    def record(self, mark: Cursor) -> None:
        """Remember how far this has been shown."""
        self._marks.put(self.number, mark)

    @property
    def _shown_to(self) -> int:
        """Where the bytes begin that were not passed on."""
        return self.offset - (self.lines.held if self.lines is not None else 0)

    def _interrupted(self) -> None:
        mark = self._marks.get(self.number)
        if mark.unfinished == LINE_BEGUN:
            self.record(mark._replace(unfinished=LINE_INTERRUPTED))

    def _put(self, shown: bytes, begin: int, resumed: int) -> None:
        if self.sink is None:
            return
        skip = min(self._skip, len(shown))
        if self._writing and len(shown) > skip:
            written = self.sink.written_at(self._writing - 1, shown[skip:])
            self._writing = self._writing + written if written else 0
            skip += written
            self._skip += written
        self._skip -= skip
        part = Segment(memoryview(shown)[skip:], self, begin, self._shown_to, skip, resumed)
        if part.view:
            self._queued = part.end
        self.sink.put(part, self.lines)


class PipeSource(Source):
    """The reading end of one output of a worker, a pipe or the master of a pseudo-terminal, and the memory file into
    which it is emptied: the agent holds both, so that they outlive a relay.

    `pipe` is -1 once the output has ended. The file has all that the worker wrote; what nobody will ask for any more is
    given back to the kernel. A file that takes no more (`ulimit -f` counts its size, though its memory was given back)
    begins again once all of it has been shown; until then the worker waits, as for a slow console.
    """

    def __init__(
        self,
        number: int,
        spool: int,
        pipe: int,
        sink: Sink | None,
        marks: CursorTable,
        poller: select.epoll,
        prefix: bytes | None = None,
        *,
        whole: bool = False,
    ) -> None:
        if marks.get(number).position > os.fstat(spool).st_size:
            # The file began again, and the relay was killed before it had recorded that.
            marks.put(number, Cursor(0, 0, marks.get(number).unfinished))
        super().__init__(number, spool, sink, marks, prefix, whole=whole)
        self.pipe = pipe
        self.terminal = pipe >= 0 and os.isatty(pipe)
        self._end = self.size()
        self.lost: OSError | None = None
        """Why some output was thrown away: not even an empty file takes it."""
        self._full = False
        self._read = b""
        """What was read and is not in the file."""
        self._before = b""
        """The end of what was in the file before it began again."""
        self._poller = poller
        self._watched = False

    def wait(self) -> None:
        """Wait for its bytes or not: a console that takes nothing makes its writers wait, as without a relay."""
        wanted = self.pipe >= 0 and not self._full and (self.sink is None or self.sink.has_room)
        if wanted and not self._watched:
            self._poller.register(self.pipe, select.EPOLLIN)
        elif self._watched and not wanted:
            self._poller.unregister(self.pipe)
        self._watched = wanted

    def fill(self, most: int = READ_BYTES) -> int:
        """Move what is in the pipe into the file; the count of bytes, 0 when there is nothing now or never again."""
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
            count = 0  # So a pseudo-terminal says that its last writer has closed it.
        if not count:
            self.close()
            return 0
        self._end += count
        self.grown = True
        return count

    def _move(self, most: int) -> int:
        if not self.terminal:
            # In the kernel, so that no byte has left the pipe that is not in the file.
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
        # No worker waits for what can never be shown.
        self.lost = error
        with contextlib.suppress(BlockingIOError):
            if not self._read and not os.read(self.pipe, READ_BYTES):
                self.close()
        self._read = b""

    def _begin_again(self) -> None:
        """Empty a full file, if all of it has been shown."""
        if (
            not self._full
            or self.grown
            or self._shown_to < self._end
            or self._marks.get(self.number).position < self._queued
        ):
            return
        self._before = (self._before + os.pread(self._fd, TAIL_BYTES, max(0, self._end - TAIL_BYTES)))[-TAIL_BYTES:]
        mark = self._marks.get(self.number)
        # In this order: a successor sees a position beyond the end, and not what was shown once more.
        os.ftruncate(self._fd, 0)
        self._full = False
        self._freed = self.offset = self._queued = self._end = 0
        self.record(Cursor(0, 0, mark.unfinished))
        if self._read:
            try:
                self._end = self._store()
                self.grown = True
                self._full = bool(self._read)
            except OSError as error:
                self._file_is_full(error)

    def behind(self, goal: int) -> bool:
        return super().behind(goal) or bool(self._read and not (self.sink is not None and self.sink.dead))

    def record(self, mark: Cursor) -> None:
        super().record(mark)
        if self._fd < 0:
            return
        unused = min(mark.position, self.offset - TAIL_BYTES) // PAGE * PAGE
        if unused - self._freed >= READ_BYTES:
            release_memory(self._fd, self._freed, unused - self._freed)
            self._freed = unused
        self._begin_again()

    def copy(self) -> None:
        super().copy()
        if self._full and not self.grown and self.lines is not None:
            begin, resumed = self._shown_to, self.lines.resumed
            self._put(self.lines.all_held(), begin, resumed)
        self._begin_again()
        if self.pipe < 0 and not self.grown and not self._read:
            self.complete()

    def tail(self) -> tuple[bytes, bool]:
        """The last of what the worker wrote, and whether there was more before it."""
        start = max(0, self._end - TAIL_BYTES)
        text = self._before + os.pread(self._fd, TAIL_BYTES, start)
        return text[-TAIL_BYTES:], start > 0 or len(text) > TAIL_BYTES or bool(self._before)

    def close(self) -> None:
        """Read nothing more from the pipe."""
        if self.pipe < 0:
            return
        if self._watched:
            # Closing is not enough: the agent has the same open file, so epoll would go on speaking of it for ever.
            self._poller.unregister(self.pipe)
            self._watched = False
        if self._full:
            with contextlib.suppress(OSError):
                while len(self._read) < 2 * READ_BYTES and (data := os.read(self.pipe, READ_BYTES)):
                    self._read += data
        os.close(self.pipe)
        self.pipe = -1
        self.grown = True
