"""Checkpoints in memory: what only a kernel can show. The holder is a real process, started as the agent does it.

Each worker is a process of its own (`workers/hold_steps.py`) or a thread of this one, since the loop of the agent
must run.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.harness import WAIT, WORKERS, kill_leftovers, still_alive, watched

from dlrover_run.coordination.records.activity import MemoryUse
from dlrover_run.features.checkpoints import write_behind
from dlrover_run.features.checkpoints.agent_memory import CheckpointMemory
from dlrover_run.features.checkpoints.held import HeldFile
from dlrover_run.features.checkpoints.memory import HeldMemory, Owner
from dlrover_run.training import checkpoint
from dlrover_run.training.checkpoint import CheckpointDirectory
from dlrover_run.training.memory_line import MemoryLine, NotHeld
from dlrover_run.training.saved_steps import SavedFile
from dlrover_run.training.whole_files import FOOTER_SIZE

sys.path.insert(0, str(WORKERS))
import hold_steps
from hold_steps import KILL_POINTS, Bytes, state_of

MIB = 1 << 20


class Node:
    """The agent's end, and what it prints."""

    def __init__(self, limit: int | None = 64, single_node: bool = True) -> None:
        self.lines: list[str] = []
        self.memory = CheckpointMemory(limit, self.lines.append, single_node=single_node)

    @property
    def environment(self) -> dict[str, str]:
        return dict(self.memory.environment())

    @property
    def holder(self) -> int:
        (pid,) = self.memory.pids
        return pid

    def directory(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointDirectory:
        """The directory of a worker that this process is."""
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        return hold_steps.directory(path)

    async def worker(self, path: Path, *steps: int, **variables: str) -> int:
        """Run a worker that saves these steps in memory; its exit code."""
        command = [sys.executable, str(WORKERS / "hold_steps.py"), str(path), *map(str, steps)]
        process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **self.environment, **variables})
        return await asyncio.wait_for(process.wait(), WAIT)

    async def use(self, **expected: int) -> MemoryUse:
        """What is held, once it is as expected."""
        async with asyncio.timeout(WAIT):
            while (use := self.memory.use) is None or any(getattr(use, key) != n for key, n in expected.items()):
                await asyncio.sleep(0.02)
        return use


@contextlib.asynccontextmanager
async def node(limit: int | None = 64, single_node: bool = True) -> AsyncIterator[Node]:
    one = Node(limit, single_node)
    one.memory.open()
    try:
        yield one
    finally:
        await one.memory.kill()


def play(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def memory_files(pid: int) -> int:
    """How many memory files a process has."""
    links = (os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink())
    return sum("dlrover-run checkpoint" in link for link in links)


async def in_thread(function: Any, *args: Any, **options: Any) -> Any:
    return await asyncio.to_thread(function, *args, **options)


@pytest.mark.torchrun
def test_a_step_survives_its_worker_and_is_written_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with node() as one:
            assert not one.memory.pids, "no process runs until a worker connects"
            assert await one.worker(tmp_path, 1, 2, 3, KILL_AT=str(KILL_POINTS - 1)) == -signal.SIGKILL
            # The third step was never whole; the two before it are on the disk soon, and stay in memory.
            await one.use(waiting=0)
            again = one.directory(tmp_path, monkeypatch)
            found = await in_thread(again.load_latest)
            assert (found.step, found.state) == (2, state_of(2, 0))
            assert await in_thread(again._memory.held, again._place) == [each.files[0] for each in _whole(tmp_path)]
            await one.memory.drain(WAIT)
            assert [each.step for each in _whole(tmp_path)] == [1, 2]
            assert one.lines == []

    play(test())
    monkeypatch.undo()
    # The same bytes as in memory, with a checksum that holds.
    from_disk = hold_steps.directory(tmp_path).load_latest()
    assert from_disk is not None
    assert (from_disk.step, from_disk.state) == (2, state_of(2, 0))
    assert not caplog.messages


def _whole(path: Path) -> list[Any]:
    from dlrover_run.training.saved_steps import complete_steps, saved_files

    return complete_steps(saved_files(os.listdir(path)))


@pytest.mark.parametrize("kill_at", range(KILL_POINTS))
def test_a_worker_that_is_killed_in_a_save_leaves_nothing_in_memory(tmp_path: Path, kill_at: int) -> None:
    async def test() -> None:
        async with node() as one:
            assert await one.worker(tmp_path, 1, 2, KILL_AT=str(kill_at)) == -signal.SIGKILL
            async with asyncio.timeout(WAIT):
                while memory_files(one.holder) != 1:
                    await asyncio.sleep(0.02)
            await one.use(used=os.path.getsize(tmp_path / SavedFile(1, hold_steps.ATTEMPT).name) - FOOTER_SIZE)

    play(test())


def test_all_is_on_the_disk_when_the_agent_ends_as_usual(tmp_path: Path) -> None:
    async def test() -> None:
        async with node() as one:
            codes = [one.worker(tmp_path, *range(1, 9), RANK=str(rank), WORLD_SIZE="2") for rank in (0, 1)]
            assert await asyncio.gather(*codes) == [0, 0]
            await one.memory.drain(WAIT)
            assert not one.memory.pids

    play(test())
    assert [each.step for each in _whole(tmp_path)] == [6, 7, 8], "three are kept"
    assert len(os.listdir(tmp_path)) == 6


def test_a_save_without_room_is_written_at_once_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with node(limit=1) as one:
            directory = one.directory(tmp_path, monkeypatch)
            for step in (1, 2):
                await in_thread(directory.save, step, state_of(step, 0, 2 * MIB), memory=True)
            assert [each.step for each in _whole(tmp_path)] == [1, 2]

    with caplog.at_level(logging.WARNING):
        play(test())
    assert ["--checkpoint-memory" in message for message in caplog.messages] == [True]


def test_without_a_launcher_a_step_is_written_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = hold_steps.directory(tmp_path)
    directory.save(1, state_of(1, 0), memory=True)
    assert [each.step for each in _whole(tmp_path)] == [1]
    assert len(caplog.messages) == 1


def test_what_is_held_cannot_be_changed(tmp_path: Path) -> None:
    async def test() -> None:
        async with node() as one:
            line = MemoryLine(one.environment)
            file = SavedFile(1)
            files = Bytes()
            await in_thread(line.save, tmp_path, file, partial(files.dump, b"right"), files.fit, 1)
            opened = await in_thread(line.open, tmp_path, file)
            with opened:
                writable = os.open(f"/proc/self/fd/{opened.fileno()}", os.O_RDWR)
                with pytest.raises(PermissionError):
                    os.pwrite(writable, b"wrong", 0)
                with pytest.raises(PermissionError):
                    mmap.mmap(writable, 0)
                os.close(writable)
                assert files.load(opened, None) == b"right"

    play(test())


def test_memory_that_is_not_sealed_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with node() as one:
            line = MemoryLine(one.environment)
            monkeypatch.setattr("dlrover_run.training.mapped_memory._SEALS", fcntl.F_SEAL_GROW)
            with pytest.raises(NotHeld):
                await in_thread(line.save, tmp_path, SavedFile(1), partial(Bytes().dump, b"x"), Bytes().fit, 1)
            await one.use(used=0)

    play(test())


@pytest.mark.parametrize("wrong", ["a token", "a request"])
def test_a_stranger_is_not_served_and_others_are(tmp_path: Path, wrong: str) -> None:
    async def test() -> None:
        async with node() as one:
            environment = one.environment
            if wrong == "a token":
                stranger = MemoryLine({**environment, "DLROVER_CHECKPOINT_MEMORY_TOKEN": "none"})
                with pytest.raises(NotHeld):
                    await in_thread(stranger.save, tmp_path, SavedFile(1), lambda plan: None, Bytes().fit, 1)
            else:
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                    connection.connect("\0" + environment["DLROVER_CHECKPOINT_MEMORY"][1:])
                    connection.settimeout(WAIT)
                    connection.send(b'["no", "request"]')
                    assert await in_thread(connection.recv, 100) == b""
            assert await one.worker(tmp_path, 1) == 0

    play(test())


def test_after_the_end_of_the_holder_steps_are_written_at_once_and_another_one_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with node() as one:
            directory = one.directory(tmp_path, monkeypatch)
            await in_thread(directory.save, 1, state_of(1, 0), memory=True)
            await one.use(waiting=0)
            first = one.holder
            os.kill(first, signal.SIGKILL)
            await in_thread(directory.save, 2, state_of(2, 0), memory=True)
            assert [each.step for each in _whole(tmp_path)] == [1, 2]
            await in_thread(directory.save, 3, state_of(3, 0), memory=True)
            await one.use(waiting=0)
            assert one.holder != first
            assert len(one.lines) == 1
            assert "SIGKILL" in one.lines[0]

    play(test())


def test_the_holder_ends_with_an_agent_that_is_killed(tmp_path: Path) -> None:
    script = f"""
import asyncio, os, subprocess, sys
from dlrover_run.features.checkpoints.agent_memory import CheckpointMemory
async def main():
    memory = CheckpointMemory(64, print)
    memory.open()
    command = [sys.executable, {str(WORKERS / "hold_steps.py")!r}, {str(tmp_path)!r}, "1"]
    worker = await asyncio.create_subprocess_exec(*command, env={{**os.environ, **memory.environment()}})
    assert await worker.wait() == 0
    print(*memory.pids, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""
    agent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    holder = int(agent.stdout.readline())
    with watched(holder) as pidfds:
        try:
            agent.kill()
            agent.communicate()
            assert still_alive(pidfds, WAIT) == 0
        finally:
            kill_leftovers(pidfds)


class Disk(write_behind.LockedFiles):
    """Refuses to sync while `full`."""

    def __init__(self) -> None:
        self.full = True

    def sync_file(self, file: Any) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def filled(memory: HeldMemory, path: Path, step: int) -> None:
    """Hold a step, as a worker has it held."""
    room = memory.reserve(5, 5, Owner())
    assert room is not None
    assert room.fd is not None
    os.write(room.fd, b"state")
    fcntl.fcntl(room.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(room.fd)
    memory.add(HeldFile(room.number, path, SavedFile(step), 5, keep=9), local_ranks=1)


def test_what_the_disk_refuses_stays_in_memory_with_one_line_and_is_tried_again(tmp_path: Path) -> None:
    disk, lines = Disk(), list[str]()
    memory = HeldMemory(MIB, lambda: 1 << 40, lambda figures: None)
    writer = threading.Thread(target=write_behind.WriteBehind(memory, lines.append, disk).run)
    filled(memory, tmp_path, 1)
    filled(memory, tmp_path, 2)
    writer.start()
    assert not memory.wait_until_written(tmp_path, SavedFile(2), WAIT)
    assert memory.names(tmp_path) == [SavedFile(1).name, SavedFile(2).name]
    assert os.listdir(tmp_path) == [], "what was begun is removed"
    disk.full = False
    assert memory.wait_until_written(tmp_path, SavedFile(2), WAIT)
    assert memory.drain() == []
    writer.join()
    assert [each.step for each in _whole(tmp_path)] == [1, 2]
    assert ["No space left" in line for line in lines] == [True]


def test_what_the_disk_refuses_to_the_end_is_named(tmp_path: Path) -> None:
    memory = HeldMemory(MIB, lambda: 1 << 40, lambda figures: None)
    writer = threading.Thread(target=write_behind.WriteBehind(memory, lambda line: None, Disk()).run)
    writer.start()
    filled(memory, tmp_path, 7)
    assert [each.file.step for each in memory.drain()] == [7]
    writer.join()


def test_what_a_killed_writer_has_left_is_removed_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    left_over = tmp_path / write_behind.TEMPORARY.format(name=SavedFile(1).name, mark="00000000")
    in_use = tmp_path / write_behind.TEMPORARY.format(name=SavedFile(2).name, mark="00000000")
    left_over.touch()
    with write_behind.LockedFiles().create(in_use):
        memory = HeldMemory(MIB, lambda: 1 << 40, lambda figures: None)
        writer = threading.Thread(target=write_behind.WriteBehind(memory, print).run)
        filled(memory, tmp_path, 3)
        writer.start()
        memory.drain()
        writer.join()
    assert sorted(os.listdir(tmp_path)) == sorted([in_use.name, SavedFile(3).name])


@pytest.mark.torchrun
def test_a_save_to_the_disk_is_not_overwritten_by_an_earlier_state_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with node(limit=256) as one:
            directory = one.directory(tmp_path, monkeypatch)
            # It takes longer to write than the later one.
            await in_thread(directory.save, 1, b"earlier" * 5_000_000, memory=True)
            assert await in_thread(directory._memory.held, directory._place) == [SavedFile(1, hold_steps.ATTEMPT)]
            await in_thread(directory.save, 1, b"later")
            await one.memory.drain(WAIT)

    play(test())
    monkeypatch.undo()
    found = hold_steps.directory(tmp_path).load_latest()
    assert found is not None
    assert found.state == b"later"


def test_the_bytes_of_a_rank_that_is_elsewhere_are_read_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a change of the number of ranks any rank reads the state of any other."""

    async def test() -> None:
        async with node() as one:
            codes = [one.worker(tmp_path, 1, RANK=str(rank), WORLD_SIZE="2") for rank in (0, 1)]
            assert await asyncio.gather(*codes) == [0, 0]
            for name, value in one.environment.items():
                monkeypatch.setenv(name, value)
            alone = CheckpointDirectory(tmp_path, files=Bytes())
            found = await in_thread(alone.load_latest)
            assert (found.step, found.state, found.world_size) == (1, None, 2)
            assert [await in_thread(found.state_of, rank) for rank in (0, 1)] == [state_of(1, 0), state_of(1, 1)]
            await one.memory.drain(WAIT)
            assert [each.step for each in _whole(tmp_path)] == [1]

    play(test())


class Group:
    """The ranks of a process group as threads of this process."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=WAIT)
        self._own = threading.local()
        monkeypatch.setattr(checkpoint.peers, "has_group", lambda: True)
        monkeypatch.setattr(checkpoint.peers, "check_size", lambda rank, size: None)
        monkeypatch.setattr(checkpoint.peers, "rank_and_size", lambda: (self._own.rank, size))
        monkeypatch.setattr(checkpoint.peers, "of_all", self._of_all)

    def _of_all(self, value: Any) -> list[Any]:
        self._values[self._own.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    async def load(self, directories: Sequence[CheckpointDirectory]) -> list[Any]:
        """What each rank loads, all at once."""

        def load(rank: int) -> Any:
            self._own.rank = rank
            return directories[rank].load_latest(together=True)

        return await asyncio.gather(*(in_thread(load, rank) for rank in range(len(directories))))


def of_node(path: Path, one: Node, **ranks: int) -> CheckpointDirectory:
    """The directory of a worker of that node."""
    files = Bytes()
    directory = CheckpointDirectory(path, files=files, **ranks, attempt=hold_steps.ATTEMPT if ranks else None)  # type: ignore[arg-type]
    line = MemoryLine({**one.environment, "DLROVER_CHECKPOINT_MEMORY_USED": "1"}, files.device)
    directory._memory = line
    return directory


def test_where_one_rank_saves_for_all_the_nodes_agree_before_anything_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with node(single_node=False) as one, node(single_node=False) as other:
            group = Group(2, monkeypatch)
            first = of_node(tmp_path, one)
            await in_thread(first.save, 1, b"at once", memory=True)
            assert len(caplog.messages) == 1
            assert [each.step for each in _whole(tmp_path)] == [1]
            both = [first, of_node(tmp_path, other)]
            assert [each.state for each in await group.load(both)] == [b"at once"] * 2
            await in_thread(first.save, 2, b"held", memory=True)
            assert await in_thread(first._memory.held, first._place) == [SavedFile(2)]
            # The other node reads it from the disk, to which it is written now.
            again = [of_node(tmp_path, one), of_node(tmp_path, other)]
            assert [(each.step, each.state) for each in await group.load(again)] == [(2, b"held")] * 2

    play(test())


def test_the_nodes_resume_from_the_newest_step_that_each_of_them_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with node(single_node=False) as one, node(single_node=False) as other:
            group = Group(2, monkeypatch)
            for place, rank in ((one, "0"), (other, "1")):
                steps = (1, 2, 3) if rank == "0" else (1, 2)
                variables = {"RANK": rank, "WORLD_SIZE": "2", "DLROVER_CHECKPOINT_MEMORY_NODES": ""}
                assert await place.worker(tmp_path, *steps, **variables) == 0
            expected = [(2, state_of(2, rank)) for rank in (0, 1)]
            both = [of_node(tmp_path, place, rank=rank, world_size=2) for rank, place in enumerate((one, other))]
            assert [(each.step, each.state) for each in await group.load(both)] == expected
            # The ranks have changed their nodes.
            both = [of_node(tmp_path, place, rank=rank, world_size=2) for rank, place in enumerate((other, one))]
            assert [(each.step, each.state) for each in await group.load(both)] == expected

    play(test())
