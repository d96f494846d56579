"""The checkpoint directory: a checkpoint is complete or absent after a kill at any moment, and damaged files are
skipped.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrover_run.training import Checkpoint, CheckpointDirectory
from dlrover_run.training.whole_files import FOOTER_SIZE, FileOperations


def state_of(step: int) -> dict[str, Any]:
    return {"weights": torch.full((64, 64), float(step)), "sampler": {"epoch": 1, "completed_num": step}}


def check(checkpoint: Checkpoint | None, step: int) -> None:
    assert checkpoint is not None
    assert checkpoint.step == step
    assert torch.equal(checkpoint.state["weights"], state_of(step)["weights"])
    assert checkpoint.state["sampler"] == state_of(step)["sampler"]


def file_names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def name_of(step: int) -> str:
    return f"step-{step:012d}.pt"


def fork(function: Callable[[], object]) -> int:
    """Run `function` in a child and return its pid; forked, so that it need not import torch again."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(0)
    return pid


def run_in_child(function: Callable[[], object]) -> int:
    """Run `function` in a child and return its wait status."""
    return os.waitpid(fork(function), 0)[1]


class Watched(FileOperations):
    """Calls `before` with the name of each operation before it is done, each write of the file included."""

    def __init__(self, before: Callable[[str], None]) -> None:
        self._before = before

    def create(self, path: Path) -> BinaryIO:
        self._before("create")
        return cast(BinaryIO, WatchedFile(super().create(path), self._before))

    def sync_file(self, file: BinaryIO) -> None:
        self._before("sync_file")
        super().sync_file(file)

    def sync_directory(self, path: Path) -> None:
        self._before("sync_directory")
        super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self._before("rename")
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._before("remove")
        super().remove(path)


class WatchedFile:
    """A file whose writes reach the kernel in two halves, so that a kill can find half of one."""

    def __init__(self, file: BinaryIO, before: Callable[[str], None]) -> None:
        self._file = file
        self._before = before

    def write(self, data: bytes | memoryview) -> int:
        whole = bytes(data)
        for half in (whole[: len(whole) // 2], whole[len(whole) // 2 :]):
            self._before("write")
            self._file.write(half)
            self._file.flush()
        return len(whole)

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def __enter__(self) -> WatchedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def test_returns_what_was_saved(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "a" / "b")
    assert directory.load_latest() is None
    path = directory.save(20, state_of(20))
    check(directory.load_latest(), 20)
    # torch can still read it as an ordinary file, with the footer or without.
    assert torch.equal(torch.load(path, weights_only=True)["weights"], state_of(20)["weights"])


def test_keeps_the_newest(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=2)
    for step in (9, 10, 100, 1000):
        directory.save(step, state_of(step))
    assert file_names(tmp_path) == [name_of(100), name_of(1000)]
    check(directory.load_latest(), 1000)


def test_a_save_of_an_earlier_step_survives_the_later_steps(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=2)
    for step in (100, 200, 300):
        directory.save(step, state_of(step))
    directory.save(60, state_of(60))
    assert directory.steps() == [60, 200, 300]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    directory.save(20, state_of(1))
    directory.save(20, state_of(20))
    check(directory.load_latest(), 20)
    assert file_names(tmp_path) == [name_of(20)]


def test_the_data_is_on_disk_before_the_file_is_renamed(tmp_path: Path) -> None:
    operations: list[str] = []
    CheckpointDirectory(tmp_path, keep=1).save(1, state_of(1))
    CheckpointDirectory(tmp_path, keep=1, files=Watched(operations.append)).save(2, state_of(2))
    without_writes = [operation for operation in operations if operation != "write"]
    assert without_writes == ["create", "sync_file", "rename", "sync_directory", "remove"]
    assert "write" not in operations[operations.index("sync_file") :]


def test_a_save_killed_at_any_moment_leaves_a_complete_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def with_two_checkpoints(name: str) -> CheckpointDirectory:
        directory = CheckpointDirectory(tmp_path / name, keep=2)
        for step in (1, 2):
            directory.save(step, state_of(step))
        return directory

    operations: list[str] = []
    rehearsal = with_two_checkpoints("rehearsal")
    CheckpointDirectory(rehearsal.path, keep=2, files=Watched(operations.append)).save(3, state_of(3))
    assert operations[-1] == "remove"

    for kill_at in range(len(operations)):
        directory = with_two_checkpoints(str(kill_at))
        doomed = CheckpointDirectory(directory.path, keep=2, files=Watched(killer(kill_at)))
        assert os.WTERMSIG(run_in_child(functools.partial(doomed.save, 3, state_of(3)))) == signal.SIGKILL
        newest = 3 if kill_at > operations.index("rename") else 2
        check(directory.load_latest(), newest)
        directory.save(4, state_of(4))
        assert file_names(directory.path) == [name_of(newest), name_of(4)]
    assert not caplog.messages


def killer(operations: int) -> Callable[[str], None]:
    """Kills its own process after this many operations."""
    left = iter(range(operations))

    def kill_in_time(_: str) -> None:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    return kill_in_time


def test_a_save_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    class Full(FileOperations):
        def sync_file(self, file: BinaryIO) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    CheckpointDirectory(tmp_path).save(1, state_of(1))
    with pytest.raises(OSError, match="No space left"):
        CheckpointDirectory(tmp_path, files=Full()).save(2, state_of(2))
    assert file_names(tmp_path) == [name_of(1)]


@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(data=st.data())
def test_a_file_with_any_damage_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: st.DataObject
) -> None:
    directory = CheckpointDirectory(tmp_path)
    directory.save(1, state_of(1))
    path = directory.save(2, state_of(2))
    whole = path.read_bytes()
    damage = data.draw(st.sampled_from(["cut", "flip", "grow", "lose the middle"]))
    # The footer is small, so half of the positions are in it.
    place = data.draw(st.integers(0, len(whole) - 1) | st.integers(len(whole) - FOOTER_SIZE, len(whole) - 1))
    damaged = {
        "cut": whole[:place],
        "flip": whole[:place] + bytes([whole[place] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[place + 1 :],
        "grow": whole + b"\0" * (place + 1),
        "lose the middle": whole[: place // 2] + whole[place // 2 + 1 :],
    }[damage]
    path.write_bytes(damaged)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="dlrover_run.training.checkpoint"):
        check(directory.load_latest(), 1)
    (message,) = caplog.messages
    assert message.startswith(f"Skip damaged checkpoint {path}: ")


def test_skips_several_damaged_files_and_reports_when_none_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = CheckpointDirectory(tmp_path)
    paths = [directory.save(step, state_of(step)) for step in (1, 2, 3)]
    for path in paths[1:]:
        os.truncate(path, 100)
    check(directory.load_latest(), 1)
    os.truncate(paths[0], 0)
    caplog.clear()
    assert directory.load_latest() is None
    assert len(caplog.messages) == 3
    # The job continues, and its next checkpoint replaces a damaged one.
    directory.save(2, state_of(2))
    check(directory.load_latest(), 2)


def test_a_complete_file_with_more_than_plain_values_is_an_error_not_damage(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    directory.save(1, state_of(1))
    path = directory.save(2, {"when": Path("somewhere")})
    with pytest.raises(ValueError, match=str(path)):
        directory.load_latest()


def test_a_concurrent_reader_always_finds_a_complete_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    last = 300
    # Only one file is kept, so that the reader's file is removed while it reads as often as possible.
    directory = CheckpointDirectory(tmp_path, keep=1)
    directory.save(0, state_of(0))

    def save_all() -> None:
        for step in range(1, last + 1):
            directory.save(step, state_of(step))

    pid = fork(save_all)
    newest = 0
    ended = False
    with caplog.at_level(logging.WARNING):
        while not ended:
            ended = os.waitpid(pid, os.WNOHANG)[0] == pid
            found = directory.load_latest()
            assert found is not None
            check(found, found.step)
            assert found.step >= newest
            newest = found.step
    assert newest == last
    assert not caplog.messages


def test_a_reader_whose_file_is_removed_before_it_can_open_it_takes_the_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = CheckpointDirectory(tmp_path, keep=1)
    directory.save(1, state_of(1))
    listdir = os.listdir

    def list_then_save(path: Path) -> list[str]:
        monkeypatch.setattr(os, "listdir", listdir)
        names = listdir(path)
        directory.save(2, state_of(2))
        return names

    monkeypatch.setattr(os, "listdir", list_then_save)
    check(directory.load_latest(), 2)


def test_refuses_invalid_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep must be at least 1"):
        CheckpointDirectory(tmp_path, keep=0)
    with pytest.raises(ValueError, match="must not be negative"):
        CheckpointDirectory(tmp_path).save(-1, {})
