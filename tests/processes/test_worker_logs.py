"""What a node answers to a question for the output of its workers, with real files and the relay's rings."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from dlrover_run.job_status.questions import (
    MAX_NODE_BYTES,
    LogCursor,
    LogPiece,
    LogRequest,
)
from dlrover_run.output import read_back as worker_logs
from dlrover_run.output import ring
from dlrover_run.output.read_back import WorkerLogs, WorkerOutput


class Node:
    """A node with one stream of rank 3, in memory files as the relay has them; `write` adds to the latest."""

    def __init__(self) -> None:
        self.fds: list[int] = []
        self.replace()
        self.logs = WorkerLogs(lambda: [WorkerOutput(3, "err", key="0")], lambda key: self.fds)

    def replace(self) -> None:
        """The worker has ended, and another one takes its place."""
        self.fds = [*self.fds[-1:], ring.create_ring()]

    def write(self, text: str) -> None:
        writer = ring.RingWriter(os.dup(self.fds[-1]))
        writer.write(text.encode())
        writer.close()

    def ask(self, request: LogRequest) -> tuple[LogPiece, ...]:
        return asyncio.run(self.logs.read(request))

    def follow(self, *after: LogCursor) -> tuple[LogPiece, ...]:
        return self.ask(LogRequest(wait=0.01, after=after))


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(worker_logs, "LOOK_INTERVAL", 0.001)
    return Node()


def test_the_last_lines_and_then_each_line_once(node: Node) -> None:
    node.write("one\ntwo\nthree\nunfin")
    (piece,) = node.ask(LogRequest(lines=2))
    assert (piece.data, piece.is_cut) == (b"three\nunfin", True)
    (piece,) = node.follow()
    assert piece.data == b"one\ntwo\nthree\n", "what is followed comes in whole lines"
    assert node.follow(piece.cursor) == ()
    node.write("ished\n")
    (more,) = node.follow(piece.cursor)
    assert more.data == b"unfinished\n"


def test_the_last_words_of_a_worker_come_before_the_first_of_the_next(node: Node) -> None:
    node.write("a\n")
    (piece,) = node.follow()
    node.write("Killed")
    node.replace()
    node.write("b\n")
    (last,) = node.follow(piece.cursor)
    assert last.data == b"Killed"
    (first,) = node.follow(last.cursor)
    assert first.data == b"b\n"


def test_what_the_relay_has_released_is_left_out_and_said(node: Node) -> None:
    node.write("first\n")
    (piece,) = node.follow()
    node.write("".join(f"line {number:06}\n" for number in range(100_000)))
    (found,) = node.follow(piece.cursor)
    assert found.is_cut
    assert found.data.startswith(b"line "), "the first whole line that is kept"


def test_an_answer_is_bounded_and_nothing_is_lost(node: Node) -> None:
    text = "".join(f"line {number:06}\n" for number in range(20_000))
    node.write(text)
    (tail,) = node.ask(LogRequest())
    assert len(tail.data) <= MAX_NODE_BYTES
    assert text.encode().endswith(tail.data)
    found, cursor = b"", LogCursor(3, "err", tail.cursor.source, 0)
    while pieces := node.follow(cursor):
        assert len(pieces[0].data) <= MAX_NODE_BYTES
        found, cursor = found + pieces[0].data, pieces[0].cursor
    assert found.decode() == text


def test_a_truncated_file_is_read_from_its_begin(tmp_path: Path) -> None:
    path = tmp_path / "stderr.log"
    path.write_text("a long line\n")
    logs = WorkerLogs(lambda: [WorkerOutput(0, "err", path=str(path))], lambda key: [])
    (piece,) = asyncio.run(logs.read(LogRequest()))
    path.write_text("new\n")
    (piece,) = asyncio.run(logs.read(LogRequest(after=(piece.cursor,))))
    assert piece.data == b"new\n"


def test_the_file_of_a_worker_that_has_ended_is_read_to_its_end_and_found_again(tmp_path: Path) -> None:
    """Its rest takes more than one answer, and a reader that comes later asks for it by itself."""
    paths = [tmp_path / f"attempt_{number}" / "0" / "stderr.log" for number in (0, 2)]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.touch()
    now = paths[0]
    logs = WorkerLogs(lambda: [WorkerOutput(0, "err", path=str(now))], lambda key: [])
    (piece,) = asyncio.run(logs.read(LogRequest(wait=0.01)))
    text = "".join(f"line {number:06}\n" for number in range(10_000))
    paths[0].write_text(text)
    now = paths[1]
    paths[1].write_text("next\n")
    found, cursor = b"", piece.cursor
    while pieces := asyncio.run(logs.read(LogRequest(wait=0.01, after=(cursor,)))):
        found, cursor = found + pieces[0].data, pieces[0].cursor
    assert found.decode() == text + "next\n"
    new = WorkerLogs(lambda: [WorkerOutput(0, "err", path=str(now))], lambda key: [])
    (piece,) = asyncio.run(new.read(LogRequest(lines=1, previous=True)))
    assert piece.data == b"line 009999\n"


def test_only_the_worker_that_was_asked_for_answers(node: Node) -> None:
    node.write("x\n")
    assert node.ask(LogRequest(worker="4")) == ()
    assert len(node.ask(LogRequest(worker="3"))) == 1


def test_the_end_of_a_job_waits_for_a_reader_that_follows(node: Node) -> None:
    """Its last question is answered with what was written last, unfinished or not."""

    async def work() -> tuple[LogPiece, ...]:
        (piece,) = await node.logs.read(LogRequest(wait=0.01))
        ending = asyncio.ensure_future(node.logs.end())
        await asyncio.sleep(0)
        node.write("done")
        assert not ending.done()
        found = await node.logs.read(LogRequest(wait=3.0, after=(piece.cursor,)))
        await ending
        return found

    node.write("x\n")
    assert [piece.data for piece in asyncio.run(work())] == [b"done"]


def test_at_the_end_a_reader_that_waits_has_its_answer_and_no_later_one_waits(node: Node) -> None:
    async def read() -> list[tuple[LogPiece, ...]]:
        (begun,) = await node.logs.read(LogRequest(wait=3600))
        waiting = asyncio.ensure_future(node.logs.read(LogRequest(wait=3600, after=(begun.cursor,))))
        await asyncio.sleep(0)
        # The workers wrote this after the last look.
        node.write("the rest\n")
        async with asyncio.timeout(60):
            await node.logs.end()
            first = await waiting
            after = tuple(piece.cursor for piece in first)
            return [first, await node.logs.read(LogRequest(wait=3600, after=after))]

    first, last = asyncio.run(read())
    assert [piece.data for piece in first] == [b"the rest\n"]
    assert last == ()
