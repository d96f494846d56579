"""Copies of checkpoints in the memory of another node: over a real connection, and after the loss of their node."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.harness import WAIT
from test_held_checkpoints import MIB, Bytes, filled, in_thread, node, play

from dlrover_run import linux
from dlrover_run.features.checkpoints import memory
from dlrover_run.features.checkpoints.copies import NONCE_BYTES, Copies, CopyReceiver
from dlrover_run.features.checkpoints.held import HeldFile
from dlrover_run.features.checkpoints.memory import Figures, HeldMemory
from dlrover_run.features.checkpoints.write_behind import WriteBehind
from dlrover_run.processes import unix_sockets
from dlrover_run.training.memory_line import MemoryLine
from dlrover_run.training.saved_steps import SavedFile

HERE = "127.0.0.1"


class Side:
    """One node: what it holds, its copies, and the sentences that it prints."""

    def __init__(self, limit: int = MIB, secret: str = "the token of the job") -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self.memory = HeldMemory(limit, lambda: 1 << 40, self._note)
        self.copies = Copies(self.memory, secret, self._tell)

    def until(self, true: Callable[[], bool]) -> None:
        """Wait until something holds after a change."""
        with self._changed:
            assert self._changed.wait_for(true, WAIT)

    def has(self, path: Path, *steps: int) -> bool:
        return self.memory.names(path) == [SavedFile(step).name for step in steps]

    def send_to(self, other: Side) -> None:
        self.copies.send_to(HERE, other.copies.listen(HERE, "key"), "key")

    def write(self) -> None:
        threading.Thread(target=WriteBehind(self.memory, print).run, daemon=True).start()

    def _note(self, figures: Figures) -> None:
        threading.Thread(target=self._wake).start()

    def _tell(self, line: str) -> None:
        self.lines.append(line)
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def test_another_node_has_a_copy_until_the_file_is_on_the_disk(tmp_path: Path) -> None:
    one, other = Side(), Side()
    one.send_to(other)
    filled(one.memory, tmp_path, 1)
    other.until(lambda: other.has(tmp_path, 1))
    fd = other.memory.open(tmp_path, SavedFile(1))
    assert fd is not None
    assert os.pread(fd, 10, 0) == b"state"
    os.close(fd)
    assert other.memory.figures.waiting == 0, "its own node writes it"
    one.write()
    other.until(lambda: other.has(tmp_path))
    assert os.listdir(tmp_path) == [SavedFile(1).name]
    assert one.lines == other.lines == []


def test_a_node_that_does_not_know_the_token_gets_nothing_and_gives_nothing(tmp_path: Path) -> None:
    one, other = Side(), Side(secret="another one")
    one.send_to(other)
    filled(one.memory, tmp_path, 1)
    one.until(lambda: bool(one.lines))
    assert other.memory.names(tmp_path) == []


def test_a_copy_without_room_is_reported_once_and_displaces_nothing(tmp_path: Path) -> None:
    one, other = Side(), Side(limit=12)
    filled(other.memory, tmp_path, 7)
    filled(other.memory, tmp_path, 8)
    one.send_to(other)
    for step in (1, 2):
        filled(one.memory, tmp_path, step)
    one.until(lambda: bool(one.lines))
    one.write()
    assert one.memory.wait_until_written(tmp_path, SavedFile(2), WAIT)
    assert other.has(tmp_path, 7, 8)
    assert len(one.lines) == 1


def test_what_another_rank_needs_of_a_copy_is_written_to_the_disk(tmp_path: Path) -> None:
    one, other = Side(), Side()
    one.send_to(other)
    filled(one.memory, tmp_path, 1)
    other.until(lambda: other.has(tmp_path, 1))
    other.write()
    assert other.memory.wait_until_written(tmp_path, SavedFile(1), WAIT)
    assert os.listdir(tmp_path) == [SavedFile(1).name]


@pytest.mark.parametrize("lost", [True, False])
def test_the_other_node_writes_what_a_lost_node_had_not_written(tmp_path: Path, lost: bool) -> None:
    """Two holders as agents start them; the disk takes nothing while both live."""
    folder = tmp_path / "checkpoints"
    files = Bytes()

    async def test() -> None:
        async with node() as one, node() as other:
            listening = MemoryLine(other.environment)
            port = await in_thread(listening.listen, HERE, "key")
            folder.touch()
            line = MemoryLine(one.environment)
            await in_thread(line.copy_to, HERE, port, "key")
            await in_thread(line.save, folder, SavedFile(5), partial(files.dump, b"five"), files.fit, 3)
            await until_held(listening, folder)
            os.kill(one.holder, signal.SIGSTOP)
            folder.unlink()
            if lost:
                os.kill(one.holder, signal.SIGKILL)
                await other.use(waiting=0)
                await until_listed(folder)
                with (folder / SavedFile(5).name).open("rb") as written:
                    assert files.load(written, None) == b"five"
            else:
                os.kill(one.holder, signal.SIGCONT)
                await one.memory.drain(WAIT)
                assert SavedFile(5).name in os.listdir(folder)

    play(test())


async def until_held(line: MemoryLine, folder: Path) -> None:
    async with asyncio.timeout(WAIT):
        while await in_thread(line.held, folder) != [SavedFile(5)]:
            await asyncio.sleep(0.02)


async def until_listed(folder: Path) -> None:
    async with asyncio.timeout(WAIT):
        while not folder.is_dir() or SavedFile(5).name not in os.listdir(folder):
            await asyncio.sleep(0.02)


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """This process may open no more descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_without_descriptors_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "DESCRIPTOR_PAUSE", 0.01)
    node = Side()
    owner = memory.Owner()
    room = node.memory.reserve(100, 100, owner)
    assert room is not None
    assert room.fd is not None
    os.write(room.fd, bytes(100))
    fcntl.fcntl(room.fd, linux.F_ADD_SEALS, memory.SEALS)
    os.close(room.fd)
    node.memory.add(HeldFile(room.number, tmp_path, SavedFile(1), 100, 1), 1)
    with no_descriptor_left():
        assert node.memory.reserve(100, 100, owner) is None
        assert node.memory.prepare_spare(100, owner) is None
        assert node.memory.reserve_copy(100) is None
        assert node.memory.figures.used == 100
        node.write()
    node.until(lambda: node.memory.figures.waiting == 0)
    assert (tmp_path / SavedFile(1).name).exists()


def test_copies_are_taken_again_once_there_are_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_sockets, "ACCEPT_PAUSE", 0.01)
    refused = threading.Event()
    accept = socket.socket.accept

    def observed(listener: socket.socket) -> Any:
        try:
            return accept(listener)
        except OSError:
            refused.set()
            raise

    monkeypatch.setattr(socket.socket, "accept", observed)
    receiver = CopyReceiver(Side().memory, HERE)
    with socket.socket() as first, no_descriptor_left():
        first.connect((HERE, receiver.port))
        assert refused.wait(WAIT)

    def is_greeted() -> bool:
        with socket.create_connection((HERE, receiver.port), WAIT) as sender:
            return len(sender.recv(64)) == NONCE_BYTES

    # One that is accepted while descriptors come back one after the other may lack one of its own, and is closed.
    assert any(is_greeted() for _ in range(100))
