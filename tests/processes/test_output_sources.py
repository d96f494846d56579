"""The relay's sources in this process, with pipes, and a console that a test opens or blocks."""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Iterator

import pytest

from dlrover_run.output import ring
from dlrover_run.output.relay.sources import READ_BYTES, PipeSource
from dlrover_run.output.ring import MAX_WRITE, RING_BYTES, TAIL_BYTES, RingWriter
from dlrover_run.output.sinks import QUEUE_LIMIT, Sink


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


class Worker:
    """A worker's pipe, which the relay reads, and the ring that keeps the end of its output."""

    def __init__(self, console: Console, prefix: bytes | None = None) -> None:
        self.poller = select.epoll()
        reader, self.fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.ring = ring.create_ring()
        self.pipe = PipeSource(1, reader, RingWriter(os.dup(self.ring)), console.sink, self.poller, prefix)

    def write(self, text: bytes) -> int:
        """Write what the pipe takes, and let the relay read while it may; the number of bytes that were taken."""
        left = memoryview(text)
        while left:
            try:
                left = left[os.write(self.fd, left) :]
            except BlockingIOError:
                return len(text) - len(left)
            self.pipe.wait()
            while self.pipe.has_room and self.pipe.read():
                assert self.pipe.sink is not None
                self.pipe.sink.flush()
        return len(text)

    def close(self) -> None:
        self.pipe.finish()
        self.poller.close()
        for fd in (self.fd, self.ring):
            os.close(fd)


@pytest.fixture
def console() -> Console:
    return Console()


@pytest.fixture
def worker(console: Console) -> Iterator[Worker]:
    worker = Worker(console)
    yield worker
    worker.close()


def test_a_console_that_takes_nothing_makes_the_worker_wait_and_then_gets_everything(
    worker: Worker, console: Console
) -> None:
    text = b"".join(b"line %d\n" % number for number in range(200_000))
    console.open = False
    taken = worker.write(text)
    assert console.sink.put_bytes <= QUEUE_LIMIT + READ_BYTES
    assert taken < len(text)
    console.open = True
    console.sink.flush()
    while worker.pipe.read():
        console.sink.flush()
    assert taken + worker.write(text[taken:]) == len(text)
    assert bytes(console.shown) == text


@pytest.mark.parametrize("when", ["before the output", "while it waits"])
def test_of_output_for_a_console_that_has_failed_the_end_is_kept(worker: Worker, console: Console, when: str) -> None:
    text = b"".join(b"line %d\n" % number for number in range(200_000))
    if when == "while it waits":
        console.open = False
        worker.write(b"a line\n")
    console.error = OSError(errno.EPIPE, "Broken pipe")
    console.sink.flush()
    assert worker.write(text) == len(text)
    assert ring.tail(worker.ring) == (text[-TAIL_BYTES:], True)
    assert not console.sink.pending


def test_what_a_dead_worker_wrote_is_read_beyond_the_room_of_the_console(worker: Worker, console: Console) -> None:
    console.open = False
    worker.write(b"x" * (2 * QUEUE_LIMIT))
    worker.pipe.read_all()
    os.write(worker.fd, b"the last words\n")
    worker.pipe.read_all()
    assert ring.tail(worker.ring)[0].endswith(b"the last words\n")


def test_a_ring_returns_what_it_still_has() -> None:
    fd = ring.create_ring()
    writer = RingWriter(os.dup(fd))
    writer.write(b"one\n")
    assert ring.tail(fd) == (b"one\n", False)
    assert ring.read(fd, 1, 2) == (1, b"ne")
    text = bytes(range(256)) * (2 * RING_BYTES // 256) + b"end"
    writer.write(text)
    assert ring.written(fd) == len(text) + 4
    first, data = ring.read(fd, 0, RING_BYTES)
    assert first == 0 or data == (b"one\n" + text)[first : first + len(data)]
    begin = len(text) + 4 - RING_BYTES
    first, data = ring.read(fd, begin, RING_BYTES)
    # The writer may be about to overwrite the first ones.
    assert first == begin + MAX_WRITE
    assert data == (b"one\n" + text)[first:]
    writer.close()
    # A relay was killed, and another one goes on.
    again = RingWriter(os.dup(fd))
    again.write(b"!")
    assert ring.tail(fd)[0].endswith(b"end!")
    again.close()
    os.close(fd)


def test_a_worker_that_is_not_read_is_not_quiet_and_its_line_is_not_broken(console: Console) -> None:
    console.open = False
    console.sink.unfinished_after = 1.0
    worker = Worker(console, b"0: ")
    worker.pipe.take(b"x" * 99 + b"\n")
    console.sink.put(b"y" * (QUEUE_LIMIT - 1) + b"\n")
    worker.pipe.take(b"half")
    assert not worker.pipe.has_room
    now = time.monotonic()
    worker.pipe.show_unfinished(now + 5)
    console.open = True
    console.sink.flush()
    worker.pipe.show_unfinished(now + 5.5)
    assert b"half" not in console.shown, "it has had no time yet to write the rest"
    worker.pipe.show_unfinished(now + 6)
    console.sink.flush()
    assert console.shown.endswith(b"\n0: half")
    worker.close()
