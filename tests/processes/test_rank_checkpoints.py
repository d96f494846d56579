"""Checkpoints of which each rank saves its own part: after a kill at any point of a save the newest step that every
rank has is resumed, bit for bit.

The state is bytes; only `load_latest`, which compares what the ranks have, imports torch. A layer below the saves stops
a rank after a number of file operations; each write reaches the disk in two halves. The ranks save one after the other,
in any order: they share nothing but the directory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from support.harness import only_long

from dlrover_run.training import checkpoint, saved_steps, whole_files
from dlrover_run.training.checkpoint import CheckpointDirectory
from dlrover_run.training.saved_steps import Attempt, SavedFile
from dlrover_run.training.whole_files import FileOperations, HashingWriter

FIRST, SECOND, THIRD = (Attempt(number, f"{number:08x}") for number in (1, 2, 3))
COMPLETE_STEPS = saved_steps.complete_steps
NEVER = 10_000
"""More file operations than a save has."""

Shot = tuple[Sequence[int], Sequence[int]]
"""The order in which the ranks save, and the number of file operations after which each is stopped."""


class Stopped(BaseException):
    """The process was killed; it does nothing more."""


class Bytes(FileOperations):
    """States are bytes; the process is stopped after some file operations."""

    def __init__(self, stop_after: int = NEVER) -> None:
        self.done: list[str] = []
        self._left = stop_after

    def _next(self, name: str) -> None:
        if not self._left:
            raise Stopped
        self._left -= 1
        self.done.append(name)

    def dump(self, state: object, file: HashingWriter) -> None:
        assert isinstance(state, bytes)
        for half in (state[: len(state) // 2], state[len(state) // 2 :]):
            self._next("write")
            file.write(half)
            file.flush()

    def load(self, file: BinaryIO, map_location: Any) -> bytes:
        return file.read()[: -whole_files.FOOTER_SIZE]

    def create(self, path: Path) -> BinaryIO:
        self._next("create")
        return super().create(path)

    def sync_file(self, file: BinaryIO) -> None:
        # Not to the disk: no machine crashes here, and the order of the operations is checked.
        self._next("sync_file")
        file.flush()

    def sync_directory(self, path: Path) -> None:
        self._next("sync_directory")

    def rename(self, source: Path, target: Path) -> None:
        self._next("rename")
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._next("remove")
        super().remove(path)


def directory_of(
    path: Path, rank: int, world: int, attempt: Attempt, keep: int = 1, files: FileOperations | None = None
) -> CheckpointDirectory:
    return CheckpointDirectory(path, keep, files or Bytes(), rank=rank, world_size=world, attempt=attempt)


def state_of(step: int, rank: int, attempt: Attempt) -> bytes:
    """What no other step, rank or attempt has."""
    return random.Random(f"{step} {rank} {attempt}").randbytes(200)


def save_all(path: Path, step: int, world: int, attempt: Attempt, keep: int = 1) -> None:
    for rank in range(world):
        directory_of(path, rank, world, attempt, keep).save(step, state_of(step, rank, attempt))


def resumed(path: Path, world: int) -> tuple[int, list[bytes]] | None:
    """The step that each of `world` ranks resumes from, and the states of all ranks that saved it."""
    found = [directory_of(path, rank, world, THIRD).load_latest() for rank in range(world)]
    steps = {None if each is None else each.step for each in found}
    assert len(steps) == 1, f"the ranks resume from different steps: {steps}"
    if (first := found[0]) is None:
        return None
    for rank, each in enumerate(found):
        assert each is not None
        expected = each.state_of(rank) if each.world_size == world else None
        assert each.state == expected
    return first.step, [first.state_of(rank) for rank in range(first.world_size)]


def shots(world: int, operations: int, seed: int, at_random: int) -> Iterator[Shot]:
    """Each point of the save of each rank, the ranks before it done and those after it not begun; then any points."""
    order = list(range(world))
    for place in order:
        for after in range(operations):
            yield order, [NEVER] * place + [after] + [0] * (world - place - 1)
    chance = random.Random(seed)
    for _ in range(at_random):
        yield chance.sample(order, world), [chance.choice([NEVER, chance.randrange(operations)]) for _ in order]


def save_until_stopped(path: Path, step: int, attempt: Attempt, shot: Shot) -> list[bool]:
    """Save with each rank; which of them have renamed their file, so that it counts."""
    order, points = shot
    renamed = [False] * len(order)
    for rank in order:
        files = Bytes(points[rank])
        with contextlib.suppress(Stopped):
            directory_of(path, rank, len(order), attempt, files=files).save(step, state_of(step, rank, attempt))
        renamed[rank] = "rename" in files.done
    return renamed


def find_faults(path: Path, world: int, seed: int = 0, at_random: int = 20) -> list[str]:
    """Stop a save of step 2 at many points, resume, and save step 2 again after each; what went wrong."""
    rehearsal = Bytes()
    save_all(path / "rehearsal", 1, world, FIRST)
    directory_of(path / "rehearsal", 0, world, SECOND, files=rehearsal).save(2, b"x")
    if "write" in rehearsal.done[rehearsal.done.index("sync_file") :] or "rename" not in rehearsal.done:
        return ["a file gets its name before its bytes are on the disk"]
    for number, shot in enumerate(shots(world, len(rehearsal.done) + 1, seed, at_random)):
        try:
            _check(path / str(number), world, shot)
        except AssertionError as error:
            return [f"{shot}: {error}"]
    return []


def _check(path: Path, world: int, shot: Shot) -> None:
    save_all(path, 1, world, FIRST)
    renamed = save_until_stopped(path, 2, SECOND, shot)
    step, attempt = (2, SECOND) if all(renamed) else (1, FIRST)
    expected = step, [state_of(step, rank, attempt) for rank in range(world)]
    assert resumed(path, world) == expected, "the newest common step is not resumed"
    assert resumed(path, world + 1) == expected, "another world does not resume from the newest common step"
    # The next attempt is stopped in the same step, before its last rank has saved it.
    for rank in range(world - 1):
        directory_of(path, rank, world, THIRD).save(2, state_of(2, rank, THIRD))
    assert resumed(path, world) == expected, "files of two attempts are taken for one checkpoint"
    directory_of(path, world - 1, world, THIRD).save(2, state_of(2, world - 1, THIRD))
    assert resumed(path, world) == (2, [state_of(2, rank, THIRD) for rank in range(world)]), "a whole step is missed"
    # A smaller world removes what is older, also what ranks that it does not have left over.
    for last in (3, 4):
        save_all(path, last, world - 1, Attempt(4, "00000004"))
    left = {saved_steps.parse(name.lstrip(".").partition(".pt")[0] + ".pt") for name in os.listdir(path)}
    assert {each and each.step for each in left} <= {3, 4}, f"files are left: {sorted(os.listdir(path))}"


@pytest.mark.torchrun
@pytest.mark.parametrize("world", [2, 3, 8, *only_long(4, 5, 6, 7)])
def test_a_save_stopped_at_any_point_resumes_from_the_newest_common_step(tmp_path: Path, world: int) -> None:
    assert find_faults(tmp_path, world, seed=world) == []


def _direct(files: FileOperations, temporary: Path, target: Path, write: Callable[[HashingWriter], None]) -> None:
    with files.create(target) as file:
        writer = HashingWriter(file)
        write(writer)
        file.write(writer.footer())
        files.sync_file(file)
    files.rename(target, target)


def _early(files: FileOperations, temporary: Path, target: Path, write: Callable[[HashingWriter], None]) -> None:
    with files.create(temporary) as file:
        files.rename(temporary, target)
        writer = HashingWriter(file)
        write(writer)
        file.write(writer.footer())
        files.sync_file(file)


def _any_rank(files: Sequence[SavedFile], damaged: Any = ()) -> list[saved_steps.SavedStep]:
    bad = {(file.step, file.attempt) for file in damaged}
    whole = [file for file in files if (file.step, file.attempt) not in bad]
    return sorted({saved_steps.SavedStep(file.step, file.attempt, file.world_size) for file in whole})


def _any_attempt(files: Sequence[SavedFile], damaged: Any = ()) -> list[saved_steps.SavedStep]:
    found = set()
    whole = [file for file in files if file not in damaged]
    for file in whole:
        same = {each.rank for each in whole if (each.step, each.world_size) == (file.step, file.world_size)}
        if len(same) == file.world_size:
            found.add(saved_steps.SavedStep(file.step, file.attempt, file.world_size))
    return sorted(found)


def _oldest(files: Sequence[SavedFile], damaged: Any = ()) -> list[saved_steps.SavedStep]:
    return COMPLETE_STEPS(files, damaged)[::-1]


def _last_steps(files: Sequence[SavedFile], newest: int, keep: int, damaged: Any = ()) -> list[SavedFile]:
    return [file for file in files if file.step < sorted({each.step for each in files})[-keep]]


def _nothing(files: Sequence[SavedFile], newest: int, keep: int, damaged: Any = ()) -> list[SavedFile]:
    return []


DEFECTS = {
    "a file has its name before it is whole": ("write_whole", _direct),
    "a file is renamed before it is written": ("write_whole", _early),
    "a step counts when any rank has it": ("complete_steps", _any_rank),
    "files of two attempts are one checkpoint": ("complete_steps", _any_attempt),
    "the oldest step is resumed": ("complete_steps", _oldest),
    "incomplete steps count among those to keep": ("removable", _last_steps),
    "nothing is removed": ("removable", _nothing),
}


@pytest.mark.torchrun
@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defects_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    name, wrong = DEFECTS[defect]
    monkeypatch.setattr(checkpoint, name, wrong)
    monkeypatch.setattr(saved_steps, name, wrong, raising=False)
    try:
        faults = find_faults(tmp_path, 3)
    except (OSError, RuntimeError) as error:
        faults = [str(error)]
    assert faults


@pytest.mark.torchrun
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_file_of_one_rank_is_named_and_its_step_is_skipped_by_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    for step in (1, 2):
        save_all(tmp_path, step, 3, FIRST, keep=2)
    path = tmp_path / SavedFile(2, FIRST, 1, 3).name
    whole = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(whole[:50] if damage == "cut" else whole[:9] + bytes([whole[9] ^ 1]) + whole[10:])
    caplog.set_level(logging.WARNING)
    for rank in range(3):
        caplog.clear()
        found = directory_of(tmp_path, rank, 3, SECOND).load_latest()
        assert found is not None
        assert (found.step, found.state) == (1, state_of(1, rank, FIRST))
        assert [path.name in message for message in caplog.messages] == ([] if damage == "remove" else [True])


@pytest.mark.torchrun
def test_a_damaged_step_is_not_one_of_those_to_keep(tmp_path: Path) -> None:
    for step in (1, 2):
        save_all(tmp_path, step, 2, FIRST, keep=2)
    os.truncate(tmp_path / SavedFile(2, FIRST, 1, 2).name, 10)
    ranks = [directory_of(tmp_path, rank, 2, SECOND, keep=2) for rank in range(2)]
    for rank in ranks:
        rank.load_latest()
    for rank, saver in reversed(list(enumerate(ranks))):
        saver.save(3, state_of(3, rank, SECOND))
    assert ranks[0].steps() == [1, 2, 3]


@pytest.mark.torchrun
def test_a_checkpoint_that_one_rank_saved_for_all_is_resumed_by_each(tmp_path: Path) -> None:
    CheckpointDirectory(tmp_path, files=Bytes()).save(5, b"for all")
    found = [directory_of(tmp_path, rank, 4, FIRST).load_latest() for rank in range(4)]
    assert [(each.step, each.state) for each in found if each is not None] == [(5, b"for all")] * 4


def test_a_rank_without_a_group_or_an_attempt_cannot_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.peers, "has_group", lambda: False)
    with pytest.raises(ValueError, match="init_process_group"):
        CheckpointDirectory(tmp_path, files=Bytes(), rank=0, world_size=2).save(1, b"")


def test_refuses_invalid_ranks(tmp_path: Path) -> None:
    for rank, world_size in ((0, None), (None, 2), (2, 2), (-1, 2)):
        with pytest.raises(ValueError, match="rank"):
            CheckpointDirectory(tmp_path, rank=rank, world_size=world_size)


def test_checkpoints_are_imported_without_torch() -> None:
    script = "import sys, dlrover_run.training.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
