"""The sentence about a rank that is behind in its collectives, and which evidence goes before the positions."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from dlrover_run.features.hangs.collectives.positions import Position, Source
from dlrover_run.features.hangs.search.codes import GuiltCode, shown_code
from dlrover_run.features.hangs.search.guilt import find_guilty, find_stall, is_held_back
from dlrover_run.features.hangs.search.suspects import Look, Place, Suspect, has_moved
from dlrover_run.words.reasons import render

SIZE = 16 << 20


def in_all_reduce(number: int, *, completed: int | None = None, **more: Any) -> tuple[Position, ...]:
    """The position of a worker in the default group of 8 ranks, as the flight recorder shows it."""
    completed = number - 1 if completed is None else completed
    values = {"name": "default_pg", "size": 8, "bytes": SIZE, "operation": "all_reduce", **more}
    return (Position("g", Source.FLIGHT_RECORDER, entered=number, number=number, completed=completed, **values),)


def waiting(rank: int, number: int = 4812, **more: Any) -> Suspect:
    values = {"busy": True, "state": "R", "outside": True, "positions": in_all_reduce(number), **more}
    return Suspect(rank, Place.DEVICE, file="train.py", line=64, function="<module>", **values)


def behind(rank: int, **more: Any) -> Suspect:
    positions = in_all_reduce(4811, completed=4811)
    values = {"place": Place.ELSEWHERE, "state": "S", "positions": positions, "file": "data.py", "line": 40, **more}
    return Suspect(rank, function="next_batch", **values)


SEVEN = [waiting(rank) for rank in range(8) if rank != 3]
NEVER = "never entered all_reduce 4,812 of the default group (16 MiB), in which 7 ranks wait"


def shuffled(*suspects: Suspect) -> list[Suspect]:
    given = list(suspects)
    Random(1).shuffle(given)
    return given


@pytest.mark.parametrize(
    ("one", "doing"),
    [
        (behind(3, sleeps=True), "it sleeps at"),
        (behind(3, state="T"), "it is stopped by a signal at"),
        (behind(3, state="D"), "it waits for a disk or a device at"),
        (behind(3, lost_child=True), "it waits for a child that is stopped or dead at"),
        (behind(3, place=Place.LOCK), "it waits for a lock at"),
        (behind(3, busy=True), "it uses its processor at"),
        (behind(3, place=Place.COLLECTIVE), "it waits in a collective at"),
        (behind(3), "it is at"),
    ],
)
def test_the_sentence_about_a_rank_that_is_behind(one: Suspect, doing: str) -> None:
    found = find_stall(shuffled(*SEVEN, one), trains=False)
    assert found is not None
    assert (found.ranks, found.code) == ((3,), GuiltCode.NEVER_ENTERED)
    assert render(found.reasons) == f"{NEVER}; {doing} data.py:40 in next_batch"
    assert shown_code(found.reasons) == GuiltCode.LAGS.code
    assert not is_held_back(found, [*SEVEN, one])


def test_a_rank_that_is_behind_on_its_device_may_compute() -> None:
    one = behind(3, place=Place.DEVICE, busy=True, outside=True)
    found = find_guilty([*SEVEN, one])
    assert render(found.reasons) == (
        f"{NEVER}; it waits for its device, or computes in one call, at data.py:40 in next_batch"
    )
    assert is_held_back(found, [*SEVEN, one])
    assert not is_held_back(found, [*SEVEN, replace(one, outside=False)])


def test_positions_name_a_rank_that_looks_like_the_others() -> None:
    suspects = [replace(waiting(rank), positions=()) for rank in range(4)]
    assert find_guilty(suspects).ranks == ()
    suspects = [waiting(0), waiting(1), replace(waiting(2), positions=in_all_reduce(4811, completed=4811)), waiting(3)]
    assert find_guilty(suspects).ranks == (2,)


def test_several_ranks_are_behind() -> None:
    found = find_guilty([waiting(0), waiting(1), behind(2), behind(3)])
    assert found.ranks == (2, 3)
    assert render(found.reasons) == (
        "never entered all_reduce 4,812 of the default group (16 MiB), in which 2 ranks wait; "
        "rank 2 is at data.py:40 in next_batch"
    )


def test_a_mismatch_names_both_sides() -> None:
    gathers = waiting(3, positions=in_all_reduce(4812, operation="all_gather", bytes=4096))
    found = find_guilty(shuffled(*SEVEN, gathers))
    assert (found.ranks, found.code) == ((3,), GuiltCode.OTHER_OPERATION)
    assert render(found.reasons).startswith(
        "is in all_gather 4,812 (4 KiB) while 7 ranks wait in all_reduce 4,812 (16 MiB) of the default group; "
    )
    assert not is_held_back(found, [*SEVEN, gathers]), "they never come together"
    found = find_guilty([waiting(0), gathers])
    assert (found.ranks, found.code) == ((0, 3), GuiltCode.OPERATIONS_DIFFER)
    text = render(found.reasons)
    assert "rank 0 in all_reduce 4,812" in text
    assert "rank 3 in all_gather 4,812" in text
    assert text.endswith("; rank 3 waits for its device, or computes in one call, at train.py:64 in <module>")
    assert shown_code(found.reasons) == GuiltCode.DIFFERS.code


def test_ranks_that_wait_for_each_other_in_two_groups() -> None:
    def in_group(group: str, number: int, entered: int) -> Position:
        return Position(
            group, Source.FLIGHT_RECORDER, operation="all_reduce", entered=entered, number=number, completed=6,
            name=group, size=2,
        )  # fmt: skip

    one = waiting(0, positions=(in_group("tp", 7, 7), in_group("dp", 6, 6)))
    other = waiting(1, positions=(in_group("tp", 6, 6), in_group("dp", 7, 7)))
    found = find_guilty([one, other])
    assert (found.ranks, found.code) == ((0, 1), GuiltCode.EACH_OTHER)
    assert not is_held_back(found, [one, other])
    assert render(found.reasons).startswith("wait for each other: rank ")


def test_the_state_of_another_process_goes_before_the_positions() -> None:
    stopped = Suspect(3, Place.ELSEWHERE, state="T", file="data.py", line=40, function="next_batch")
    found = find_guilty([*SEVEN, stopped, behind(8)])
    assert (found.ranks, found.code) == ((3,), GuiltCode.STOPPED)
    assert "in all_reduce 4,812 of the default group" in render(found.reasons)


def test_a_rank_of_which_no_source_says_anything() -> None:
    given = [waiting(rank, positions=in_all_reduce(4812, members="0-7")) for rank in range(8) if rank != 3]
    silent = behind(3, positions=())
    found = find_guilty([*given, silent])
    assert (found.ranks, found.code) == ((3,), GuiltCode.OFF_DEVICE)
    assert "while 7 ranks wait for it in all_reduce 4,812 of the default group (16 MiB)" in render(found.reasons)
    unseen = Suspect(3)
    found = find_guilty([*given, unseen])
    assert (found.ranks, found.code) == ((3,), GuiltCode.SHOWS_NOTHING)


def test_all_ranks_in_one_operation() -> None:
    suspects = [waiting(rank) for rank in range(4)]
    found = find_guilty(suspects)
    assert (found.ranks, found.code) == ((), GuiltCode.ON_DEVICE)
    assert render(found.reasons) == (
        "every rank waits for its device, or computes in one call, at train.py:64 in <module>; "
        "all have entered all_reduce 4,812 (16 MiB)"
    )
    assert is_held_back(found, suspects)
    cut = [replace(one, unsent=3 if one.rank == 2 else 1) for one in suspects]
    found = find_guilty(cut)
    assert (found.ranks, found.code) == ((2,), GuiltCode.NETWORK)
    assert not is_held_back(found, cut), "no kernel computes in a collective that all have entered"


def test_a_job_whose_workers_enter_operations_goes_on() -> None:
    suspects = [replace(waiting(rank), moved=True) for rank in range(2)]
    assert find_stall([*suspects, behind(2)], trains=True) is None
    first = Look(7, in_all_reduce(5))
    assert has_moved(first, Look(7, in_all_reduce(6)), Place.COLLECTIVE)
    assert not has_moved(first, Look(7, in_all_reduce(5)), Place.DEVICE)
    assert not has_moved(first, Look(7), Place.DEVICE), "the source has not answered"
    assert has_moved(first, Look(8, in_all_reduce(5)), Place.DEVICE)
    assert not has_moved(first, Look(8, in_all_reduce(5)), Place.ELSEWHERE), "it looks for something again and again"
    assert not has_moved(Look(0), Look(8), Place.DEVICE)


def test_a_name_of_a_group_is_in_the_sentence() -> None:
    for name, shown in (("tp", "group tp"), ("", "their group")):
        ahead = waiting(0, positions=in_all_reduce(4812, name=name))
        late = behind(1, positions=in_all_reduce(4811, completed=4811, name=name))
        assert f"4,812 of {shown} " in render(find_guilty([ahead, late]).reasons)


def by_ras(rank: int, number: int = 193, **more: Any) -> Suspect:
    """A worker of two that waits for its device, of which RAS says what it has launched."""
    position = Position("g", Source.RAS, "all_reduce", number, number, name="default_pg", size=2)
    values = {"busy": True, "state": "R", "outside": True, "file": "train.py", "line": 60 + rank, "function": "step"}
    return Suspect(rank, Place.DEVICE, **(values | {"positions": (position,)} | more))


def test_where_no_rank_is_behind_the_last_operation_of_all_is_named() -> None:
    """RAS does not say which operations have ended, so all may compute in one call as well."""
    even = "; no rank is behind: each has launched up to all_reduce 193 of the default group"
    suspects = [by_ras(0), by_ras(1)]
    found = find_guilty(suspects)
    assert found.code is GuiltCode.DIFFERENT_WAITS
    assert render(found.reasons) == (
        "wait for their devices at different places, at train.py:60 in step, and at train.py:61 in step" + even
    )
    assert is_held_back(found, suspects)
    same = find_guilty([by_ras(0, line=60), by_ras(1, line=60)])
    assert render(same.reasons) == (
        "every rank waits for its device, or computes in one call, at train.py:60 in step" + even
    )
    cut = find_guilty([by_ras(0, line=60, unsent=1), by_ras(1, line=60)])
    assert render(cut.reasons) == "has sent data that is not acknowledged, at train.py:60 in step" + even


@pytest.mark.parametrize("change", [{"positions": ()}, {"place": Place.ELSEWHERE, "busy": False, "outside": False}])
def test_that_no_rank_is_behind_is_said_only_of_positions_of_all_that_may_wait(change: dict[str, Any]) -> None:
    found = find_guilty([by_ras(0), replace(by_ras(1), **change)])
    assert not GuiltCode.NONE_BEHIND.within(found.reasons)


def among(rank: int, size: int, **more: Any) -> Suspect:
    """A worker of a group of `size` ranks, by a report of RAS in which others are missing."""
    position = Position("g", Source.RAS, "all_reduce", 193, 193, name="default_pg", size=size, members=f"0-{size - 1}")
    return by_ras(rank, positions=(position,), **more)


def test_a_rank_that_hears_nothing_of_the_others_is_named_and_of_two_both() -> None:
    others = [by_ras(rank, positions=()) for rank in range(3)]
    found = find_guilty([*others, among(3, 4)])
    assert (found.ranks, found.code) == ((3,), GuiltCode.HEARS_NOTHING)
    assert render(found.reasons).startswith(
        "hears nothing of ranks 0-2 in all_reduce 193 of the default group; it waits for its device"
    )
    found = find_guilty([by_ras(0, positions=()), among(1, 2)])
    assert (found.ranks, found.code) == ((0, 1), GuiltCode.HEAR_NOTHING)
    assert render(found.reasons).startswith(
        "hear nothing of each other in all_reduce 193 of the default group; rank 1 waits for its device"
    )
    assert shown_code(found.reasons) == GuiltCode.ALONE.code


@pytest.mark.parametrize("unsent", [0, 2])
def test_a_rank_that_nobody_hears_and_whose_data_is_not_acknowledged_does_not_compute(unsent: int) -> None:
    cut = by_ras(3, positions=(), unsent=unsent)
    suspects = [cut, *(among(rank, 4, unsent=min(unsent, 1)) for rank in range(3))]
    found = find_guilty(suspects)
    assert found.ranks == (3,)
    assert is_held_back(found, suspects) is not bool(unsent)
