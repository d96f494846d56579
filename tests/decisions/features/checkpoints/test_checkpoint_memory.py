"""Which checkpoints stay in memory, and which one a restarted job resumes from: pure decisions."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dlrover_run.features.checkpoints import process
from dlrover_run.features.checkpoints.held import HELD_STEPS, HeldFile, HeldFiles
from dlrover_run.training.saved_steps import (
    Attempt,
    SavedFile,
    complete_steps,
    files_to_read,
    own_file,
    wanted_on_disk,
)

HERE = Path("/checkpoints")
FIRST = Attempt(1, "11111111")


def of_rank(step: int, rank: int = 0, world: int = 2) -> SavedFile:
    return SavedFile(step, FIRST, rank, world)


def hold(files: HeldFiles, file: SavedFile, size: int = 10, directory: Path = HERE, own: bool = True) -> int:
    number, _ = files.reserve(size)
    assert number is not None, "there is no room"
    files.add(HeldFile(number, directory, file, size, own=own))
    return number


def held(files: HeldFiles) -> list[int]:
    return [file.step for file in files.in_directory(HERE)]


def write_all(files: HeldFiles) -> None:
    while (one := files.next_to_write()) is not None:
        files.note_written(one.number)


def test_the_newest_steps_stay_once_they_are_on_the_disk() -> None:
    files = HeldFiles(1000)
    for step in range(1, 6):
        hold(files, of_rank(step))
    assert held(files) == [1, 2, 3, 4, 5]
    write_all(files)
    assert held(files) == [4, 5]
    assert len(held(files)) == HELD_STEPS
    assert files.used == 20


def test_the_ranks_of_a_node_do_not_displace_each_other() -> None:
    files = HeldFiles(1000)
    for step in (1, 2, 3):
        for rank in (0, 1):
            hold(files, of_rank(step, rank))
    write_all(files)
    assert [(file.step, file.rank) for file in files.in_directory(HERE)] == [(2, 0), (2, 1), (3, 0), (3, 1)]


def test_files_are_written_in_the_order_in_which_they_came() -> None:
    files = HeldFiles(1000)
    for step in (5, 3, 4):
        hold(files, of_rank(step))
    order = []
    while (one := files.next_to_write()) is not None:
        order.append(one.file.step)
        files.note_written(one.number)
    assert order == [5, 3, 4]


def test_what_is_on_the_disk_leaves_for_what_is_not() -> None:
    files = HeldFiles(30)
    first, second = hold(files, of_rank(1)), hold(files, of_rank(2))
    assert files.reserve(20) == (None, []), "nothing that only memory has may leave"
    files.note_written(first)
    number, left = files.reserve(20)
    assert (number is not None, left) == (True, [first])
    files.note_written(second)
    assert files.reserve(40) == (None, []), "more than the limit never fits"
    assert held(files) == [2]


def test_a_spare_leaves_before_a_step_and_displaces_none() -> None:
    files = HeldFiles(40)
    hold(files, of_rank(1))
    write_all(files)
    spare, _ = files.reserve(20, spare=True)
    assert spare is not None
    assert files.reserve(20, spare=True)[0] is None
    assert files.reserve(20)[1] == [spare]
    assert not files.take_spare(spare)


def test_a_step_that_is_saved_again_replaces_its_earlier_state() -> None:
    files = HeldFiles(100)
    hold(files, of_rank(1))
    second = hold(files, of_rank(1))
    found = files.find(HERE, of_rank(1))
    assert found is not None
    assert found.number == second
    assert files.used == 10


def test_a_file_that_the_disk_refuses_is_tried_again_with_the_next_one() -> None:
    files = HeldFiles(100)
    first = hold(files, of_rank(1))
    files.postpone(first)
    assert files.next_to_write() is None
    assert files.is_postponed(first)
    hold(files, of_rank(2))
    following = files.next_to_write()
    assert following is not None
    assert following.number == first


def test_a_copy_of_another_node_is_not_written_and_leaves_first() -> None:
    files = HeldFiles(40)
    own = hold(files, of_rank(1))
    write_all(files)
    copy, _ = files.reserve(10)
    assert copy is not None
    files.add(HeldFile(copy, HERE, of_rank(9, rank=1), 10, own=False, written=True))
    assert files.next_to_write() is None
    assert files.reserve(25)[1] == [copy]
    assert files.reserve(10)[1] == [own]


def copies(files: HeldFiles) -> list[tuple[int, int]]:
    """The step and the rank of what is copied, in order, until nothing is left."""
    found = []
    while (one := files.next_to_copy()) is not None:
        found.append((one.file.step, one.file.rank))
        files.note_copied(one.number)
    return found


def test_the_newest_step_is_copied_first_and_a_step_that_was_begun_is_finished() -> None:
    files = HeldFiles(1000)
    for rank in (0, 1):
        hold(files, of_rank(1, rank))
    first = files.next_to_copy()
    assert first is not None
    files.note_copied(first.number)
    hold(files, of_rank(2, 0))
    hold(files, of_rank(3, 0))
    assert copies(files) == [(1, 0 if first.file.rank else 1), (3, 0), (2, 0)]


def test_what_is_on_the_disk_needs_no_copy_and_one_that_was_made_is_dropped_once() -> None:
    files = HeldFiles(1000)
    for step in (1, 2):
        hold(files, of_rank(step))
    one = files.next_to_copy()
    assert one is not None
    files.note_copied(one.number)
    assert files.next_to_drop() is None
    write_all(files)
    assert copies(files) == []
    assert files.next_to_drop() == one
    assert files.next_to_drop() is None


def test_a_copy_of_a_step_that_is_saved_again_is_not_dropped() -> None:
    files = HeldFiles(1000)
    hold(files, of_rank(1))
    assert copies(files) == [(1, 0)]
    hold(files, of_rank(1))
    assert files.next_to_drop() is None
    assert copies(files) == [(1, 0)]


def test_a_copy_is_written_only_when_its_node_is_lost() -> None:
    files = HeldFiles(1000)
    copy, _ = files.reserve(10)
    assert copy is not None
    files.add(HeldFile(copy, HERE, of_rank(1), 10, own=False, written=True))
    assert files.next_to_write() is None
    files.adopt(copy)
    one = files.next_to_write()
    assert one is not None
    assert one.number == copy


@pytest.mark.parametrize(("ranks", "whole"), [([0], False), ([0, 1], True)])
def test_a_step_is_whole_here_when_all_ranks_of_the_node_have_it(ranks: list[int], whole: bool) -> None:
    files = HeldFiles(100)
    for rank in ranks:
        last = HeldFile(files.reserve(1)[0] or 0, HERE, of_rank(1, rank, world=4), 1)
        files.add(last)
    assert files.is_whole_here(last, local_ranks=2) is whole


@pytest.mark.parametrize("seed", range(20))
def test_no_step_leaves_memory_before_it_is_on_the_disk(seed: int) -> None:
    """Any order of saves, writes, refusals and ends of workers."""
    chance = random.Random(seed)
    files = HeldFiles(100)
    only_here: dict[SavedFile, int] = {}
    open_rooms: list[tuple[int, int]] = []
    for step in range(300):
        match chance.choice(["reserve", "spare", "add", "add", "write", "refuse", "end"]):
            case "reserve" | "spare" as kind:
                size = chance.randint(1, 40)
                number, _ = files.reserve(size, spare=kind == "spare")
                if number is not None and kind == "reserve":
                    open_rooms.append((number, size))
            case "add" if open_rooms:
                number, size = open_rooms.pop()
                file = of_rank(step, chance.randrange(2))
                files.add(HeldFile(number, HERE, file, size))
                only_here[file] = number
            case "write" if (one := files.next_to_write()) is not None:
                files.note_written(one.number)
                del only_here[one.file]
            case "refuse" if (one := files.next_to_write()) is not None:
                files.postpone(one.number)
            case "end" if open_rooms:
                files.release(open_rooms.pop()[0])
        assert files.used <= files.limit
        assert only_here.keys() <= set(files.in_directory(HERE))


def test_a_step_counts_when_each_rank_has_it_in_memory_or_on_the_disk() -> None:
    on_disk = [of_rank(1, 0), of_rank(1, 1), of_rank(2, 0)]
    in_memory = {of_rank(2, 1), of_rank(3, 0)}
    assert [step.step for step in complete_steps({*on_disk, *in_memory})] == [1, 2]


def test_what_only_another_node_has_in_memory_is_wanted_on_the_disk() -> None:
    (step,) = complete_steps([of_rank(1, 0), of_rank(1, 1)])
    reads = [files_to_read(step, rank, 2) for rank in (0, 1)]
    assert reads == [{of_rank(1, 0)}, {of_rank(1, 1)}]
    both = {of_rank(1, 0), of_rank(1, 1)}
    assert wanted_on_disk([both, both], reads) == set(), "each reads its own from memory"
    assert wanted_on_disk([{of_rank(1, 0)}, set()], reads) == set(), "rank 1 reads what is on the disk"
    assert wanted_on_disk([both, set()], reads) == {of_rank(1, 1)}
    assert wanted_on_disk([{of_rank(1, 1)}, {of_rank(1, 0)}], reads) == both, "the ranks have changed their nodes"


def test_all_files_are_wanted_after_a_change_of_the_number_of_ranks() -> None:
    (step,) = complete_steps([of_rank(1, 0), of_rank(1, 1)])
    assert own_file(step, 0, 3) is None
    reads = [files_to_read(step, rank, 3) for rank in range(3)]
    held_by = [{of_rank(1, 0)}, {of_rank(1, 0)}, {of_rank(1, 1)}]
    assert wanted_on_disk(held_by, reads) == {of_rank(1, 0), of_rank(1, 1)}


def test_one_file_for_all_is_wanted_where_a_rank_is_on_another_node() -> None:
    (step,) = complete_steps([SavedFile(7)])
    reads = [files_to_read(step, rank, 2) for rank in (0, 1)]
    assert wanted_on_disk([{SavedFile(7)}, set()], reads) == {SavedFile(7)}
    assert wanted_on_disk([{SavedFile(7)}, {SavedFile(7)}], reads) == set()


def machine(root: Path, total: int, available: int, limit: str | None = None, used: int = 0, cached: int = 0) -> Path:
    """A /proc of a machine with that many bytes, in a control group of version 2 if it has a `limit`."""
    proc, group = root / "proc", root / "group"
    (proc / "self").mkdir(parents=True)
    group.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: {total // 1024} kB\nMemAvailable: {available // 1024} kB\n")
    (proc / "self" / "cgroup").write_text("0::/\n")
    (proc / "self" / "mountinfo").write_text(f"30 20 0:26 / {group} rw - cgroup2 cgroup2 rw\n")
    if limit is not None:
        (group / "memory.max").write_text(limit)
        (group / "memory.current").write_text(str(used))
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")
    return proc


GIB = 2**30


@pytest.mark.parametrize(("limit", "expected"), [(None, 16 * GIB), ("max", 16 * GIB), (str(8 * GIB), 2 * GIB)])
def test_the_default_limit_is_a_quarter_of_the_memory(tmp_path: Path, limit: str | None, expected: int) -> None:
    assert process.default_limit(machine(tmp_path, 64 * GIB, 32 * GIB, limit)) == expected


def test_what_is_free_is_what_the_machine_and_the_control_group_have_left(tmp_path: Path) -> None:
    assert process.free_bytes(machine(tmp_path / "a", 64 * GIB, 32 * GIB)) == 32 * GIB - process.KEPT_FREE
    crowded = machine(tmp_path / "b", 64 * GIB, 32 * GIB, str(8 * GIB), used=7 * GIB, cached=2 * GIB)
    assert process.free_bytes(crowded) == 3 * GIB - process.KEPT_FREE
    assert process.free_bytes(machine(tmp_path / "c", 64 * GIB, 0)) == 0
