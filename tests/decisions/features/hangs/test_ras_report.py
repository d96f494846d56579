"""What NCCL RAS reports, in JSON and in the text of older versions, and whose positions it shows: recorded, generated,
damaged, of another job, of many ranks."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.nccl_ras import (
    Communicator,
    RasJob,
    RasRank,
    generated_job,
    json_report,
    recorded_report,
    text_report,
)

from dlrover_run.features.hangs.collectives.compare import LagKind, Operation, compare
from dlrover_run.features.hangs.collectives.positions import MAX_POSITIONS, Source
from dlrover_run.features.hangs.collectives.ras_positions import ras_positions
from dlrover_run.features.hangs.collectives.ras_report import Launched, Place, parse_report

FORMATS = {"json": json_report, "text": lambda job: text_report(job, verbose=True), "brief": text_report}
both = pytest.mark.parametrize("report", FORMATS.values(), ids=FORMATS)


def _behind(ranks: int, late: int, number: int = 100):
    """A job in which one rank has launched less than the others."""
    return generated_job(
        ranks, lambda group, rank: {"AllReduce": number - 2 * (rank == late), "Broadcast": 5}, per_node=ranks
    )


def _pids(ranks: int) -> dict[int, int]:
    return {1000 + rank: rank for rank in range(ranks)}


def test_the_recorded_report_names_the_rank_that_slept() -> None:
    (one,) = parse_report(recorded_report())
    assert (one.hash, one.size, one.places[1]) == ("1991020451f915dd", 2, Place(1365, "127.0.0.1"))
    assert one.launched == {"AllReduce": Launched({0: 121, 1: 119}, {})}
    (lag,) = compare(ras_positions([one], {1364: 0, 1365: 1}, 2))
    assert (lag.kind, lag.ranks, lag.waiting, lag.awaited) == (
        LagKind.BEHIND,
        (1,),
        (0,),
        Operation("all_reduce", 120),
    )
    assert lag.group_name == "default_pg"
    assert lag.source is Source.RAS


@both
@pytest.mark.parametrize("ranks", [2, 4, 8, 512])
def test_a_rank_that_is_behind_is_found_in_each_format(report, ranks) -> None:
    found = ras_positions(parse_report(report(_behind(ranks, 1))), _pids(ranks), ranks)
    (lag,) = compare(found)
    assert (lag.ranks, lag.waiting_count) == ((1,), ranks - 1)
    assert lag.awaited == Operation("all_reduce", 99)
    assert len(lag.waiting) == ranks - 1


@both
def test_ranks_that_are_equally_far_are_behind_in_nothing(report) -> None:
    job = generated_job(4, lambda group, rank: {"AllReduce": 100})
    assert compare(ras_positions(parse_report(report(job)), _pids(4), 4)) == ()


def test_only_what_is_of_our_processes_on_this_node_counts() -> None:
    # Two nodes, on which the processes have the same ids; and the ids of another job.
    job = generated_job(4, lambda group, rank: {"AllReduce": 100 - (rank == 3)}, per_node=2)
    twins = [
        RasRank(one.rank, 1000 + one.rank % 2, one.counts, one.host, one.gpu) for one in job.communicators[0].ranks
    ]
    report = json_report(RasJob([Communicator(7, twins)]))
    second = ras_positions(parse_report(report), {1000: 2, 1001: 3}, 4, lambda host: host == "10.0.0.2")
    assert {rank: own[0].entered for rank, own in second.items()} == {2: 100, 3: 99}
    first = ras_positions(parse_report(report), {1000: 0, 1001: 1}, 4, lambda host: host == "10.0.0.1")
    assert {rank: own[0].entered for rank, own in first.items()} == {0: 100, 1: 100}
    # What one node knows of the ranks of others is in its own positions.
    assert second[3][0].ahead == 3
    assert first[0][0].furthest == 100
    (lag,) = compare({**first, **second})
    assert (lag.ranks, lag.waiting) == ((3,), (0, 1, 2))
    assert ras_positions(parse_report(report), {4000: 0, 4001: 1}, 2) == {}


@both
def test_a_worker_whose_script_runs_in_a_child_is_known_by_it(report) -> None:
    shells = {500 + rank: rank for rank in range(4)}
    (lag,) = compare(ras_positions(parse_report(report(_behind(4, 1))), {**shells, **_pids(4)}, 4))
    assert (lag.ranks, lag.waiting) == ((1,), (0, 2, 3))


def test_ranks_of_groups_are_global_ranks_where_all_are_here() -> None:
    groups = [(0, 1), (2, 3), (0, 2), (1, 3)]
    job = generated_job(
        4, lambda group, rank: {"AllReduce": 50 - (group == 2 and rank == 3)} if group else {}, groups, per_node=4
    )
    found = ras_positions(parse_report(json_report(job)), _pids(4), 4)
    (lag,) = compare(found)
    assert (lag.ranks, lag.waiting, lag.group_name) == ((3,), (2,), "")
    assert {one.members for one in found[3]} == {"2-3", "1,3"}


def test_a_stopped_process_is_silent_in_its_group() -> None:
    job = generated_job(4, lambda group, rank: {"AllReduce": 100}, per_node=4, missing=(2,))
    (lag,) = compare(ras_positions(parse_report(json_report(job)), _pids(4), 4))
    assert (lag.kind, lag.ranks, lag.waiting) == (LagKind.SILENT, (2,), (0, 1, 3))
    text = parse_report(text_report(job, verbose=True))
    assert text[0].missing == {2: Place(1002, "10.0.0.1")}


@both
def test_ranks_in_two_kinds_of_operations_are_a_mismatch(report) -> None:
    counts = {0: {"AllReduce": 100, "Broadcast": 5}, 1: {"AllReduce": 99, "Broadcast": 6}}
    job = generated_job(2, lambda group, rank: counts[rank])
    (lag,) = compare(ras_positions(parse_report(report(job)), _pids(2), 2))
    assert lag.kind is LagKind.MISMATCH
    assert lag.is_even
    assert {lag.awaited.name, lag.own.name} == {"all_reduce", "broadcast"}


def test_of_a_rank_in_many_groups_those_that_differ_are_kept() -> None:
    groups = [tuple(range(2)) for _ in range(12)]
    job = generated_job(2, lambda group, rank: {"AllReduce": 1000 - 10 * group - (group == 9 and rank == 1)}, groups)
    found = ras_positions(parse_report(json_report(job)), _pids(2), 2)
    assert len(found[1]) == MAX_POSITIONS
    (lag,) = compare(found)
    assert (lag.ranks, lag.awaited.number) == ((1,), 910)


FIRST_VERSION = """
Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         8         8         8   RUNNING  MISMATCH

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  6 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 2 -- GPU 2 managed by process 1002 on node 10.0.0.1
  Rank 5 -- GPU 5 managed by process 1005 on node 10.0.0.1

"""


def test_the_first_versions_count_all_kinds_of_operations_together() -> None:
    (lag,) = compare(ras_positions(parse_report(FIRST_VERSION), _pids(8), 8))
    assert (lag.ranks, lag.waiting_count, lag.awaited) == ((2, 5), 6, Operation("", 6650))


def test_a_rank_without_a_process_and_unknown_fields_are_left_out() -> None:
    report = json.loads(json_report(_behind(2, 1)))
    report["new"] = {"field": [1]}
    first = report["communicators"][0]
    first["ranks"][0]["pid"] = -1
    first["ranks"][0]["collective_counts"]["AllReduce"] = "many"
    first["ranks"].append({"rank": "x"})
    first["ranks"].append(None)
    report["communicators"].append(5)
    (one,) = parse_report(json.dumps(report))
    assert one.places[0].pid == 0
    assert one.launched["AllReduce"].by_rank == {1: 98}


@given(st.sampled_from(sorted(FORMATS)), st.integers(0, 10**6))
def test_a_damaged_report_is_read_as_far_as_it_goes(name, choice) -> None:
    draw = random.Random(choice)
    text = FORMATS[name](_behind(4, 1))
    for _ in range(draw.randrange(1, 6)):
        at = draw.randrange(len(text))
        match draw.randrange(3):
            case 0:
                text = text[:at]
            case 1:
                text = text[:at] + draw.choice(["\x00", "9" * 500, "-", "{", "}", "\n", "Rank "]) + text[at:]
            case _:
                text = text[:at] + text[at + draw.randrange(1, 40) :]
        text = text or "x"
    for position in (one for own in ras_positions(parse_report(text), _pids(4), 4).values() for one in own):
        assert position.number == position.entered


@given(st.text(max_size=200))
def test_any_text_is_read(text) -> None:
    parse_report(text)
    parse_report("{" + text)
