"""The last step of a worker is saved when it is stopped or has lost a peer, and at no other end."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from dlrover_run.training import checkpoint
from dlrover_run.training.checkpoint import STOP_LOCK, CheckpointDirectory
from dlrover_run.training.saved_steps import Attempt
from dlrover_run.training.whole_files import FOOTER_SIZE, FileOperations, HashingWriter

GLOO_LOST = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:14222. This is typically caused by"
GLOO_RESET = "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:3242: Connection reset by peer. This is typically"


class Bytes(FileOperations):
    """States are bytes, so that torch is not imported."""

    saved = 0

    def dump(self, state: object, file: HashingWriter) -> None:
        assert isinstance(state, bytes)
        self.saved += 1
        file.write(state)

    def load(self, file: BinaryIO, map_location: Any) -> bytes:
        return file.read()[:-FOOTER_SIZE]


def train(directory: CheckpointDirectory, event: Callable[[int], None]) -> None:
    """Four steps; `event` is called in the middle of each with the number of completed steps."""
    step, state = 0, b"0"
    with directory.save_at_stop(lambda: (step, state)) as last:
        while step < 4:
            event(step)
            step, state = step + 1, str(step + 1).encode()
            last.check()


def at(step: int, act: Callable[[], object]) -> Callable[[int], None]:
    return lambda completed: act() and None if completed == step else None


def lose_peer(message: str) -> None:
    raise RuntimeError(message)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_worker_after_its_step_which_is_saved(tmp_path: Path, number: signal.Signals) -> None:
    directory = CheckpointDirectory(tmp_path, files=Bytes())
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended:
        train(directory, at(2, lambda: os.kill(os.getpid(), number)))
    assert ended.value.code == 128 + number
    found = directory.load_latest()
    assert found is not None
    assert (found.step, found.state) == (3, b"3")
    assert signal.getsignal(number) is before


def test_a_signal_after_the_last_check_is_not_lost(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, files=Bytes())

    def stop_after_the_last_check() -> None:
        with directory.save_at_stop(lambda: (7, b"7")) as last:
            last.check()
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        stop_after_the_last_check()
    assert directory.steps() == [7]


@pytest.mark.parametrize("message", [GLOO_LOST, GLOO_RESET])
def test_a_broken_collective_saves_the_step_before_it_and_goes_on(tmp_path: Path, message: str) -> None:
    directory = CheckpointDirectory(tmp_path, files=Bytes())
    with pytest.raises(RuntimeError, match="by peer"):
        train(directory, at(2, lambda: lose_peer(message)))
    assert directory.steps() == [2]


class Stopping(Bytes):
    """The launcher stops the worker while it saves."""

    def sync_file(self, file: BinaryIO) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        super().sync_file(file)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    lose_peer(GLOO_LOST)


@pytest.mark.parametrize(("files", "event"), [(Bytes(), stop), (Stopping(), lambda: lose_peer(GLOO_LOST))])
def test_a_stop_of_a_worker_that_saves_takes_effect_after_the_save(
    tmp_path: Path, files: Bytes, event: Callable[[], None]
) -> None:
    directory = CheckpointDirectory(tmp_path, files=files)
    seen: list[list[int]] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(directory.steps()))
    try:
        with pytest.raises(RuntimeError, match="by peer"):
            train(directory, at(2, event))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [[2]]


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("connection closed by peer")])
def test_an_error_of_the_script_saves_nothing(tmp_path: Path, error: Exception) -> None:
    def fail() -> None:
        raise error

    directory = CheckpointDirectory(tmp_path, files=Bytes())
    with pytest.raises(type(error)):
        train(directory, at(2, fail))
    assert directory.steps() == []


def test_a_run_to_its_end_saves_nothing(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, files=Bytes())
    train(directory, lambda step: None)
    assert directory.steps() == []


def test_one_of_the_ranks_that_are_left_saves(tmp_path: Path) -> None:
    files = Bytes()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            train(CheckpointDirectory(tmp_path, files=files), at(2, lambda: lose_peer(GLOO_LOST)))
    assert files.saved == 1


def test_a_damaged_save_of_another_rank_is_replaced(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, files=Bytes())
    os.truncate(directory.save(2, b"2"), 3)
    with pytest.raises(RuntimeError):
        train(directory, at(2, lambda: lose_peer(GLOO_LOST)))
    found = directory.load_latest()
    assert found is not None
    assert found.state == b"2"


def test_a_rank_that_holds_the_lock_too_long_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "STOP_LOCK_TIMEOUT", 0.0)
    directory = CheckpointDirectory(tmp_path, files=Bytes())
    with (tmp_path / STOP_LOCK).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError):
            train(directory, at(2, lambda: lose_peer(GLOO_LOST)))
    assert directory.steps() == [2]


def test_each_rank_saves_its_own_part(tmp_path: Path) -> None:
    for rank in range(2):
        one = CheckpointDirectory(tmp_path, files=Bytes(), rank=rank, world_size=2, attempt=Attempt(1, "0000000a"))
        with pytest.raises(RuntimeError):
            train(one, at(2, lambda: lose_peer(GLOO_LOST)))
    assert CheckpointDirectory(tmp_path, files=Bytes()).steps() == [2]


@pytest.mark.parametrize("error", [OSError("no space"), RuntimeError("failed to recv, got 0 bytes")])
def test_the_cause_of_the_end_is_not_hidden_by_a_save_that_fails(tmp_path: Path, error: Exception) -> None:
    class Full(Bytes):
        def create(self, path: Path) -> BinaryIO:
            raise error

    with pytest.raises(RuntimeError, match="by peer"):
        train(CheckpointDirectory(tmp_path, files=Full()), at(2, lambda: lose_peer(GLOO_LOST)))
