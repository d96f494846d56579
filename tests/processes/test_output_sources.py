"""The relay's sources in this process, with memory files, pipes and a console that a test opens or blocks."""

from __future__ import annotations

import errno
import os
import resource
import select
import time
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover_run.output.cursors import Cursor, CursorTable, create_cursor_table, reset_cursor
from dlrover_run.output.sinks import Sink
from dlrover_run.output.sources import READ_BYTES, PipeSource
from dlrover_run.output.streams import TAIL_BYTES

BLOCK = 512
"""Bytes of one block in the result of `fstat`."""

SOME = 20 * READ_BYTES
"""More bytes of output than a source may keep in memory."""


class Console:
    """Accepts bytes while it is `open`, and fails once it has an `error`."""

    def __init__(self) -> None:
        self.shown = bytearray()
        self.open = True
        self.error: OSError | None = None
        self.sink = Sink(-1, self._write)

    def _write(self, view: memoryview) -> int:
        if self.error is not None:
            raise self.error
        if not self.open:
            raise BlockingIOError
        self.shown.extend(view)
        return len(view)


class Rig:
    """What a relay gets from its agent: marks, and a memory file and a pipe for each source."""

    def __init__(self) -> None:
        self.poller = select.epoll()
        self.marks_fd = create_cursor_table()
        self.fds: list[int] = [self.marks_fd]
        self.writers: dict[int, int] = {}
        self.spools: dict[int, int] = {}
        self.readers: dict[int, int] = {}

    def pipe(
        self, number: int, sink: Sink | None, prefix: bytes | None = None, *, terminal: bool = False
    ) -> PipeSource:
        """A source as the first relay has it."""
        reset_cursor(self.marks_fd, number, 0)
        ends = os.openpty() if terminal else os.pipe2(os.O_CLOEXEC)
        if terminal:
            tty.setraw(ends[1])
        for fd in ends:
            os.set_blocking(fd, False)
        self.readers[number], self.writers[number] = ends
        self.spools[number] = os.memfd_create("spool")
        self.fds += [self.readers[number], self.writers[number], self.spools[number]]
        return self.again(number, sink, prefix)

    def again(self, number: int, sink: Sink | None, prefix: bytes | None = None) -> PipeSource:
        """The same source as a successor has it."""
        ends = os.dup(self.spools[number]), os.dup(self.readers[number])
        return PipeSource(number, *ends, sink, CursorTable(os.dup(self.marks_fd)), self.poller, prefix)

    def mark(self, number: int) -> Cursor:
        return CursorTable(os.dup(self.marks_fd)).get(number)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.poller.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def _write_to_pipe(rig: Rig, pipe: PipeSource, text: bytes) -> None:
    """Write `text` as a worker, and let the relay take it from the pipe up to the limit of its file."""
    view = memoryview(text)
    while view:
        view = view[os.write(rig.writers[pipe.number], view) :]
        pipe.fill()


def _copy(pipe: PipeSource) -> None:
    """Let the relay copy until nothing is left to do."""
    while pipe.can_copy:
        pipe.copy()
        if pipe.sink is not None:
            pipe.sink.flush()


def test_output_after_the_end_of_a_source_does_not_touch_a_new_file_with_its_descriptor(rig: Rig) -> None:
    console = Console()
    pipe = rig.pipe(1, console.sink)
    first = pipe._fd
    console.open = False
    _write_to_pipe(rig, pipe, b"x" * (2 * READ_BYTES))
    _copy(pipe)
    pipe.close()
    pipe.finish()
    # The next worker's file gets the lowest free descriptor.
    text = b"y" * (2 * READ_BYTES)
    spool = os.memfd_create("the next worker's")
    os.dup2(spool, first)
    os.pwrite(first, text, 0)
    console.open = True
    console.sink.flush()
    assert console.shown.count(b"x") == 2 * READ_BYTES
    zeros = os.pread(spool, 2 * READ_BYTES, 0).count(0)
    assert zeros == 0
    for fd in {spool, first}:
        os.close(fd)


@pytest.mark.parametrize("prefix", [None, b"> "])
@pytest.mark.parametrize("when", ["before the output", "while it waits"])
def test_output_for_a_console_that_has_failed_is_not_kept_in_memory(rig: Rig, prefix: bytes | None, when: str) -> None:
    console = Console()
    pipe = rig.pipe(1, console.sink, prefix)
    if when == "while it waits":
        console.open = False
        _write_to_pipe(rig, pipe, b"a line\n" * (READ_BYTES // 7))
        _copy(pipe)
    console.error = OSError(errno.EPIPE, "Broken pipe")
    for _ in range(SOME // READ_BYTES):
        _write_to_pipe(rig, pipe, b"a line\n" * (READ_BYTES // 7))
        _copy(pipe)
    kept = os.fstat(rig.spools[1]).st_blocks * BLOCK
    assert kept <= 2 * READ_BYTES
    # The last output of a worker is known all the same.
    assert pipe.tail() == ((b"a line\n" * (READ_BYTES // 7))[-TAIL_BYTES:], True)


LIMIT = 3 * READ_BYTES + 1000
"""The maximum size of a file where there is a limit."""


@pytest.fixture
def small_files(rig: Rig) -> Iterator[None]:
    """As `ulimit -f`, set after the agent has created its own files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _numbered(count: int) -> bytes:
    return b"".join(b"line %d\n" % number for number in range(count))


@pytest.mark.parametrize("kind", ["as it is", "prefixed", "terminal", "shown nowhere"])
@pytest.mark.usefixtures("small_files")
def test_output_larger_than_the_file_limit_is_shown_completely(rig: Rig, kind: str) -> None:
    console = Console()
    prefix = b"> " if kind == "prefixed" else None
    pipe = rig.pipe(1, None if kind == "shown nowhere" else console.sink, prefix, terminal=kind == "terminal")
    text = b"".join(b"line %d\n" % number for number in range(1_500_000))
    assert len(text) > 5 * LIMIT
    left, refused = memoryview(text), 0
    while left:
        # The console blocks now and then: then the file is full, and the worker waits.
        console.open = refused != 1
        try:
            left = left[os.write(rig.writers[1], left[: 64 * 1024 + 1]) :]
            refused = 0
        except BlockingIOError:
            refused += 1
            assert refused < 5, "the worker waits for ever"
        pipe.wait()
        if pipe._watched:
            pipe.fill()
        _copy(pipe)
        console.sink.flush()
    # The last bytes may have been written while it blocked.
    console.open = True
    while pipe.fill():
        pass
    pipe.close()
    while pipe.behind(pipe.size()):
        _copy(pipe)
    console.sink.flush()
    assert pipe.tail() == (text[-TAIL_BYTES:], True)
    shown = b"" if kind == "shown nowhere" else text.replace(b"line", (prefix or b"") + b"line")
    assert (len(console.shown), bytes(console.shown) == shown) == (len(shown), True)


@pytest.mark.usefixtures("small_files")
def test_a_source_may_end_while_a_slow_console_has_not_taken_its_full_file(rig: Rig) -> None:
    console = Console()
    console.open = False
    pipe = rig.pipe(1, console.sink)
    text = b"a line\n" * (LIMIT // 7)
    _write_to_pipe(rig, pipe, text)
    # The file does not have room for all of this.
    os.write(rig.writers[1], b"x" * READ_BYTES)
    pipe.fill()
    pipe.fill()
    _copy(pipe)
    pipe.finish()
    console.open = True
    console.sink.flush()
    assert console.shown.startswith(text)


@pytest.mark.usefixtures("small_files")
def test_a_successor_continues_with_a_file_that_was_restarted(rig: Rig) -> None:
    console = Console()
    pipe = rig.pipe(1, console.sink)
    text = b"a line\n" * (LIMIT // 7 + 1000)
    _write_to_pipe(rig, pipe, text[:LIMIT])
    _copy(pipe)
    before = rig.mark(1)
    _write_to_pipe(rig, pipe, text[LIMIT:])
    _copy(pipe)
    _copy(pipe)
    assert os.fstat(rig.spools[1]).st_size == 0
    # The relay was killed after it had emptied the file, and before it recorded that.
    CursorTable(os.dup(rig.marks_fd)).put(1, before)
    successor = rig.again(1, console.sink)
    _write_to_pipe(rig, successor, b"the last line\n")
    _copy(successor)
    assert len(console.shown) == len(text) + len(b"the last line\n")
    assert console.shown.endswith(b"a line\nthe last line\n")


@pytest.mark.parametrize("prefix", [b"", b"> "])
def test_a_successor_knows_whose_unfinished_line_another_source_has_ended(rig: Rig, prefix: bytes) -> None:
    console = Console()
    console.sink.unfinished_after = 0.0
    one, other = (rig.pipe(number, console.sink, prefix) for number in (1, 2))
    for pipe, text in ((one, b"loading ..."), (other, b"a line\n")):
        _write_to_pipe(rig, pipe, text)
        _copy(pipe)
        pipe.show_unfinished(time.monotonic() + 1)
        console.sink.flush()
    assert bytes(console.shown) == prefix + b"loading ...\n" + prefix + b"a line\n"
    # Another relay continues from here, with its own sink.
    again = Console()
    one, other = (rig.again(number, again.sink, prefix) for number in (1, 2))
    _write_to_pipe(rig, other, b"another line\n")
    _copy(other)
    _write_to_pipe(rig, one, b" done\n")
    _copy(one)
    assert bytes(again.shown) == prefix + b"another line\n" + prefix + b" done\n"


def test_a_successor_continues_after_the_unfinished_line_that_was_shown_last(rig: Rig) -> None:
    console = Console()
    console.sink.unfinished_after = 0.0
    pipe = rig.pipe(1, console.sink, b"> ")
    _write_to_pipe(rig, pipe, b"loading ...")
    _copy(pipe)
    pipe.show_unfinished(time.monotonic() + 1)
    console.sink.flush()
    again = Console()
    successor = rig.again(1, again.sink, b"> ")
    _write_to_pipe(rig, successor, b" done\n")
    _copy(successor)
    assert bytes(again.shown) == b" done\n"


class _Killed(BaseException):
    pass


class KilledRelays:
    """Relays, each the successor of the previous one, that write the lines of two sources to one file."""

    def __init__(self, rig: Rig, file: int) -> None:
        self.rig = rig
        self.file = file
        for number in (1, 2):
            rig.pipe(number, Sink(file, self._write), b"> ")
        self.left: int | None = None

    def _write(self, view: memoryview) -> int:
        if self.left is None:
            return os.write(self.file, view)
        count = os.write(self.file, view[: self.left])
        self.left -= count
        if self.left == 0:
            raise _Killed
        return count

    def run(self, first: bytes = b"", second: bytes = b"", *, killed_after: int | None = None, ended: bool) -> None:
        """Run one relay. It is killed in the write that adds byte number `killed_after` of this relay."""
        self.left = killed_after
        sink = Sink(self.file, self._write)
        sources = [self.rig.again(number, sink, b"> ") for number in (1, 2)]
        for source, text in zip(sources, (first, second), strict=True):
            _write_to_pipe(self.rig, source, text)
        try:
            for source in sources:
                source.resume()
            for source in sources:
                _copy(source)
            if ended:
                for source in sources:
                    source.finish()
                sink.flush()
        except _Killed:
            pass


@pytest.mark.parametrize("killed_in", [1, 5, 12, 22])
@pytest.mark.parametrize("killed_again_in", [None, 1, 12, 13, 22, 30])
def test_the_successor_of_a_relay_that_was_killed_in_a_write_completes_it_before_any_other(
    rig: Rig, tmp_path: Path, killed_in: int, killed_again_in: int | None
) -> None:
    file = os.open(tmp_path / "console", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    relays = KilledRelays(rig, file)
    relays.run(second=b"line one\nline two\n", killed_after=killed_in, ended=False)
    relays.run(first=b"other one\nother two\n", killed_after=killed_again_in, ended=False)
    relays.run(ended=True)
    os.close(file)
    lines = (tmp_path / "console").read_text().splitlines()
    for word in ("line", "other"):
        assert [line for line in lines if word in line] == [f"> {word} one", f"> {word} two"]
    assert len(lines) == 4


@pytest.mark.parametrize("killed_in", [1, 5, 9, 10])
@pytest.mark.parametrize("killed_again_in", [None, 1, 5, 12])
def test_a_last_line_without_a_newline_is_shown_once_by_the_successor_of_a_relay_that_was_killed_in_it(
    rig: Rig, tmp_path: Path, killed_in: int, killed_again_in: int | None
) -> None:
    file = os.open(tmp_path / "console", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    relays = KilledRelays(rig, file)
    relays.run(second=b"the end", killed_after=killed_in, ended=True)
    relays.run(first=b"other one\n", killed_after=killed_again_in, ended=False)
    relays.run(ended=True)
    os.close(file)
    assert sorted((tmp_path / "console").read_text().splitlines()) == ["> other one", "> the end"]
