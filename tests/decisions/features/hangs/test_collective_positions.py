"""Who is behind in which collective, by the positions of all ranks: of jobs of tensor, pipeline and data parallelism
too, where of several groups the rank is named for which all wait in the end."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from parallel_jobs import Call, play, program, ras, recorder

from dlrover_run.features.hangs.collectives.compare import LagKind, Operation, common_operation, compare
from dlrover_run.features.hangs.collectives.positions import MAX_POSITIONS, Position, Source
from dlrover_run.features.hangs.collectives.rank_sets import MAX_TEXT, pack, unpack
from dlrover_run.features.hangs.collectives.text import describe_position, position_lines
from dlrover_run.features.hangs.search.suspects import DeviceUse, Suspect
from dlrover_run.words.text import format_ranks

ALL = tuple(range(4))
REDUCE = Call("default", ALL, "all_reduce", 2**24)


def _positions(source, calls, stops, ahead=1, absent=()):
    played = play(calls, stops, ahead)
    return {"ras": ras, "flight recorder": recorder}[source](played, absent)


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("source", ["ras", "flight recorder"])
def test_a_rank_that_has_not_entered_a_collective_is_behind_in_it(source, ahead) -> None:
    (lag,) = compare(_positions(source, dict.fromkeys(ALL, [REDUCE] * 20), {2: 11}, ahead))
    assert (lag.kind, lag.ranks, lag.waiting, lag.waiting_count) == (LagKind.BEHIND, (2,), (0, 1, 3), 3)
    assert lag.final
    assert (lag.awaited.name, lag.awaited.number) == ("all_reduce", 12)
    if source == "flight recorder":
        assert lag.awaited == Operation("all_reduce", 12, 2**24, "float32")
        assert lag.group_name == "default"


@pytest.mark.parametrize("source", ["ras", "flight recorder"])
def test_ranks_that_are_equally_far_are_not_behind(source) -> None:
    calls = dict.fromkeys(ALL, [REDUCE] * 20)
    assert compare(_positions(source, calls, dict.fromkeys(ALL, 11))) == ()
    assert compare(_positions(source, calls, {})) == ()
    assert compare({}) == ()


def test_the_operation_in_which_all_wait_is_known_of_a_recorder() -> None:
    waiting = Position("g", Source.FLIGHT_RECORDER, "all_reduce", 12, 12, completed=11, bytes=64)
    assert common_operation({0: [waiting], 1: [waiting]}) == Operation("all_reduce", 12, 64)
    assert common_operation({0: [waiting], 1: [replace(waiting, completed=12)]}) is None
    assert common_operation({0: [waiting], 1: []}) is None


def test_a_rank_that_has_ended_an_operation_waits_in_a_later_one() -> None:
    # The root of a broadcast goes on without the others, and waits in what follows.
    here = Position("g", Source.FLIGHT_RECORDER, "all_reduce", 13, 13, completed=12)
    (lag,) = compare({0: [here], 1: [replace(here, operation="broadcast", entered=11, number=11, completed=11)]})
    assert (lag.ranks, lag.awaited) == ((1,), Operation("all_reduce", 13))


@pytest.mark.parametrize("source", ["ras", "flight recorder"])
def test_another_operation_in_place_of_that_of_the_others_is_a_mismatch_of_both_sides(source) -> None:
    wrong = Call("default", ALL, "broadcast", 64)
    calls = {**dict.fromkeys(ALL, [REDUCE] * 20), 1: [REDUCE] * 7 + [wrong] + [REDUCE] * 12}
    played = play(calls, dict.fromkeys(ALL, 8))
    for rank in ALL:
        played.ended[rank] = 7  # Two kinds of operations never meet.
    (lag,) = compare({"ras": ras, "flight recorder": recorder}[source](played))
    assert (lag.kind, lag.ranks, lag.waiting) == (LagKind.MISMATCH, (1,), (0, 2, 3))
    assert lag.awaited.name == "all_reduce"
    assert lag.own is not None
    assert lag.own.name == "broadcast"
    assert not lag.is_even
    assert lag.final


@pytest.mark.parametrize("source", ["ras", "flight recorder"])
def test_of_two_sides_of_the_same_size_none_is_wrong(source) -> None:
    both = (0, 1)
    one, other = Call("default", both, "all_reduce"), Call("default", both, "broadcast")
    played = play({0: [one, one], 1: [one, other]}, {})
    played.ended[0] = played.ended[1] = 1
    (lag,) = compare({"ras": ras, "flight recorder": recorder}[source](played))
    assert lag.kind is LagKind.MISMATCH
    assert {*lag.ranks, *lag.waiting} == {0, 1}
    assert lag.is_even


def test_another_size_is_a_mismatch_where_an_operation_has_one_size() -> None:
    here = Position("g", Source.FLIGHT_RECORDER, "all_reduce", 12, 12, completed=11, bytes=64, dtype="float32")
    (lag,) = compare({0: [here], 1: [here], 2: [replace(here, bytes=128)]})
    assert (lag.kind, lag.ranks) == (LagKind.MISMATCH, (2,))
    assert lag.own == Operation("all_reduce", 12, 128, "float32")
    assert lag.awaited == Operation("all_reduce", 12, 64, "float32")
    scattered = replace(here, operation="scatter")
    assert compare({0: [scattered], 1: [replace(scattered, bytes=128)]}) == ()


@pytest.mark.parametrize("source", ["ras", "flight recorder"])
def test_a_rank_of_which_no_source_tells_is_silent(source) -> None:
    (lag,) = compare(_positions(source, dict.fromkeys(ALL, [REDUCE] * 20), {3: 11}, absent=(3,)))
    assert (lag.kind, lag.ranks, lag.waiting, lag.final) == (LagKind.SILENT, (3,), (0, 1, 2), True)
    assert lag.awaited.name == "all_reduce"
    assert lag.awaited.number == 12


@pytest.mark.parametrize("heard", [(3,), (0, 3), (0, 1, 3)])
def test_a_rank_that_hears_as_few_as_are_missing_may_be_the_one_that_is_cut_off(heard) -> None:
    missing = tuple(rank for rank in ALL if rank not in heard)
    (lag,) = compare(_positions("ras", dict.fromkeys(ALL, [REDUCE] * 20), {}, absent=missing))
    assert lag.final
    if len(heard) > len(missing):
        assert (lag.kind, lag.ranks, lag.waiting) == (LagKind.SILENT, missing, heard)
    else:
        assert (lag.kind, lag.ranks, lag.waiting) == (LagKind.APART, heard, missing)
        assert lag.is_even == (len(heard) == len(missing))
    assert lag.awaited == Operation("all_reduce", 20)


def test_ranks_that_wait_in_no_operation_wait_for_no_silent_rank() -> None:
    idle = Position("g", Source.FLIGHT_RECORDER, "all_reduce", 12, 12, completed=12, members="0-3")
    assert compare({0: [idle], 1: [idle]}) == ()


def test_a_rank_that_waits_for_another_one_is_not_the_last() -> None:
    first, second = Call("a", (0, 1), "all_reduce"), Call("b", (1, 2), "all_reduce")
    last, before = compare(recorder(play({0: [first] * 2, 1: [second, first] * 2, 2: [second] * 2}, {2: 1})))
    assert (last.ranks, last.waiting, last.final) == ((2,), (1,), True)
    assert (before.ranks, before.waiting, before.final) == ((1,), (0,), False)


def test_groups_in_another_order_are_a_deadlock_of_both() -> None:
    first, second = Call("a", (0, 1), "all_reduce"), Call("b", (0, 1), "all_reduce")
    lags = compare(recorder(play({0: [first, second], 1: [second, first]}, {})))
    # Neither has a position yet in the group of the other one: the members say that it is missing there.
    assert {lag.kind for lag in lags} == {LagKind.ORDER}
    played = play({0: [first, second, first, second], 1: [first, second, second, first]}, {})
    lag, other = compare(recorder(played))
    assert (lag.kind, other.kind) == (LagKind.ORDER, LagKind.ORDER)
    assert (lag.ranks, other.ranks) in [((0,), (1,)), ((1,), (0,))]
    assert lag.own == other.awaited
    assert lag.is_even


def test_a_rank_that_receives_from_one_that_sends_nothing_waits_for_it() -> None:
    receives = Position("pp", Source.FLIGHT_RECORDER, "recv", 5, 5, completed=4, peer=0, size=2)
    idle = Position("pp", Source.FLIGHT_RECORDER, "send", 4, 4, completed=4, peer=1, size=2)
    (lag,) = compare({0: [idle], 1: [receives]})
    assert (lag.kind, lag.ranks, lag.waiting, lag.awaited.name) == (LagKind.BEHIND, (0,), (1,), "recv")
    (lag,) = compare({0: [replace(idle, operation="recv", entered=5, number=5)], 1: [receives]})
    assert (lag.kind, lag.is_even) == (LagKind.MISMATCH, True)
    for here in (replace(idle, entered=5, number=5), replace(idle, entered=7, number=5)):
        assert compare({0: [here], 1: [receives]}) == ()
    # In a larger group the numbers of two ranks count other things.
    assert compare({0: [replace(idle, operation="recv", entered=5, size=4)], 1: [replace(receives, size=4)]}) == ()


def test_ranks_on_other_nodes_count_where_a_report_shows_them() -> None:
    # A report in text lists only the outliers: those that are ahead have no position.
    behind = Position("g", Source.RAS, "all_reduce", 119, 119, size=8, furthest=121, ahead=7)
    (lag,) = compare({3: [behind]})
    assert (lag.ranks, lag.waiting, lag.waiting_count) == ((3,), (), 7)
    assert lag.awaited == Operation("all_reduce", 120)


SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)).filter(lambda shape: _ranks(shape) >= 2)


def _ranks(shape) -> int:
    tensor, pipeline, data = shape
    return tensor * pipeline * data


@given(SHAPES, st.integers(0, 10**6), st.integers(1, 3))
def test_of_several_groups_the_rank_is_named_for_which_all_wait_in_the_end(shape, choice, ahead) -> None:
    calls = program(*shape, steps=4)
    draw = random.Random(choice)
    rank = draw.randrange(_ranks(shape))
    position = draw.randrange(1, len(calls[rank]))
    played = play(calls, {rank: position}, ahead)
    if all(len(played.entered[other]) == len(own) for other, own in calls.items() if other != rank):
        return  # All others have ended: nobody waits.
    shown = recorder(played)
    lags = compare(shown)
    assert lags[0].final
    assert lags[0].ranks == (rank,)
    assert {one for lag in lags if lag.final for one in lag.ranks} == {rank}
    mixed = {one: draw.sample(list(own), len(own)) for one, own in draw.sample(list(shown.items()), len(shown))}
    assert compare(mixed)[0].ranks == (rank,)


@given(SHAPES, st.integers(0, 10**6))
def test_ras_names_the_rank_among_those_that_wait_in_no_collective(shape, choice) -> None:
    calls = program(*shape, steps=4)
    draw = random.Random(choice)
    rank = draw.randrange(_ranks(shape))
    played = play(calls, {rank: draw.randrange(1, len(calls[rank]))})
    lags = compare(ras(played))
    finals = {one for lag in lags if lag.final for one in lag.ranks}
    waiting = {one for lag in lags for one in lag.waiting}
    # Sends and receives are not counted: a rank that waits in one looks as if it waited for nothing.
    assert not finals & waiting
    if any(rank in lag.ranks for lag in lags):
        assert rank in finals


@given(st.sets(st.integers(0, 5000), max_size=40))
def test_ranks_as_text_are_the_same_ranks_or_left_out(ranks) -> None:
    text = pack(ranks)
    assert len(text) <= MAX_TEXT
    assert unpack(text) == ranks or not text


def test_ranks_with_a_step_are_a_short_text() -> None:
    assert pack(range(512)) == "0-511"
    assert pack(range(3, 512, 8)) == "3-507:8"
    assert pack([0, 4]) == "0,4"
    assert pack([*range(0, 64, 8), 99]) == "0-56:8,99"
    assert unpack("0-56:8,99") == {*range(0, 64, 8), 99}
    for text in ("-", "1-2-3", "5-", "1:", "0-99999999999", ",", "::"):
        unpack(text)  # Whatever another node sends.
    assert unpack("0-99999999999") == frozenset()
    assert unpack("x") == frozenset()


def test_a_suspect_with_positions_travels() -> None:
    position = Position("g" * 64, Source.RAS, "all_reduce", 2**40, 2**40, members="0-511", size=512, furthest=2**41)
    suspect = Suspect(1, positions=(position,) * MAX_POSITIONS, device=DeviceUse(99, 100, 127))
    encoded = msgspec.json.encode(suspect)
    assert msgspec.json.decode(encoded, type=Suspect) == suspect
    # 256 of them on one node are a report of less than 400 KB.
    assert len(encoded) < 1600
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(replace(suspect, positions=(position,) * 7)), type=Suspect)
    assert b"positions" not in msgspec.json.encode(Suspect(1))


def test_positions_are_shown_with_their_operation_and_ranks_in_the_same_place_together() -> None:
    waits = Position(
        "g", Source.FLIGHT_RECORDER, "all_reduce", 4813, 4812, completed=4811, name="default_pg", bytes=2**24
    )
    done = replace(waits, entered=4811, number=4811, completed=4811)
    lines = position_lines({0: [waits], 1: [done], 2: [waits], 3: [waits]}, format_ranks)
    assert lines == [
        "ranks 0, 2, 3: waits in all_reduce 4,812 of the default group (16 MiB): entered 4,813, ended 4,811",
        "rank 1: has ended 4,811: all_reduce 4,811 of the default group (16 MiB)",
    ]
    asked = Position("g", Source.RAS, "all_reduce", 119, 119, size=8, ahead=7)
    assert position_lines({0: [asked, waits]}, format_ranks) == position_lines({0: [waits]}, format_ranks)
    assert describe_position(asked) == "has launched all_reduce 119 of a group of 8, 7 of 8 ranks have launched more"
    receives = Position("pp", Source.FLIGHT_RECORDER, "recv", 5, 5, completed=4, peer=0, size=2, name="pp")
    assert describe_position(receives) == "waits in recv 5 with rank 0 of group pp: entered 5, ended 4"
