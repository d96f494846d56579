"""What follows from the failures of a job: the verdict, or the one thing that the next round changes."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from dlrover_run.features.experiments.advise import Advice, Possible, advise, may_pass
from dlrover_run.features.experiments.evidence import weigh
from dlrover_run.features.experiments.kinds import Kind
from dlrover_run.features.experiments.model import Alike, Cause, Change, Passed, Suspect, Trial

KIND = Kind("0" * 16, "exception", "RuntimeError", "train.py:7 in step")
OTHER = Kind("1" * 16, "exception", "ValueError", "train.py:9 in load")
ALL = Possible(devices=True, nodes=True, checkpoint=False)


def trial(rank: int, node: int, device: int, **more: Any) -> Trial:
    return Trial(
        **{
            "round": more.pop("number", 1), "kind": KIND, "rank": rank, "local_rank": rank % 4, "node": f"n{node}",
            "host": f"n{node}", "device": f"GPU {device}", "workers": 16, "local": 4, **more,
        }
    )  # fmt: skip


def test_one_failure_changes_nothing() -> None:
    assert advise([trial(5, 1, 1)], [], ALL) == Advice()
    assert advise([], [], ALL) == Advice()


def test_failures_of_two_kinds_are_no_repetition() -> None:
    assert advise([trial(5, 1, 1), trial(5, 1, 1, kind=OTHER)], [], ALL) == Advice()


def test_the_same_failure_in_one_place_changes_the_cheapest_thing_first() -> None:
    twice = [trial(5, 1, 1), trial(5, 1, 1)]
    assert advise(twice, [], ALL) == Advice(change=Change.DEVICES, suspect=Suspect(Cause.GPU, "n1", "GPU 1"))
    fixed = ALL._replace(devices=False)
    assert advise(twice, [], fixed) == Advice(change=Change.NODES, suspect=Suspect(Cause.NODE, "n1"))
    assert advise(twice, [], Possible()) == Advice()


def test_what_follows_a_device_and_not_its_rank_is_the_node_s() -> None:
    found = advise([trial(5, 1, 1), trial(5, 1, 1), trial(4, 1, 1), trial(4, 1, 1)], [], ALL).verdict
    assert found is not None
    assert found.removes == "n1"
    assert not found.stops


def test_what_follows_a_rank_over_devices_and_nodes_stops() -> None:
    history = [trial(5, 1, 1), trial(5, 1, 1), trial(5, 1, 2)]
    assert advise(history, [], ALL).change is Change.NODES
    # One failure may be seen elsewhere than it was, so the first one on the other node is not enough.
    assert advise([*history, trial(5, 3, 1)], [], ALL).verdict is None
    moved = advise([*history, trial(5, 3, 1), trial(5, 3, 1)], [], ALL).verdict
    assert moved is not None
    assert moved.stops
    assert moved.suspect == Suspect(Cause.RANK, number=5)
    assert (moved.there, moved.failures) == (5, 5)


def test_a_step_that_comes_again_far_from_the_begin_is_no_chance() -> None:
    deep = [
        trial(5, 1, 1, depth=400, resumed=0),
        trial(5, 1, 1, depth=400, resumed=0),
        trial(5, 1, 2, depth=400, resumed=0),
    ]
    assert weigh(deep)[Suspect(Cause.CHANCE)] < 1e-5
    early = [trial(5, 1, 1, depth=1, resumed=0)] * 3
    assert weigh(early)[Suspect(Cause.CHANCE)] > 100 * weigh(deep)[Suspect(Cause.CHANCE)]


def test_all_ranks_that_fail_alike_at_one_step_are_the_code_and_at_the_start_perhaps_what_is_away() -> None:
    deep = [trial(rank, rank // 4, 1, alike=Alike.NODES, resumed=0, depth=400) for rank in (5, 9, 2)]
    found = advise(deep, [], ALL).verdict
    assert found is not None
    assert found.suspect.cause is Cause.CODE
    assert found.stops
    early = [replace(each, depth=0) for each in deep]
    assert advise([*early, *early], [], ALL).verdict is None


def test_what_may_pass_by_itself_never_stops_a_job() -> None:
    away = Kind("2" * 16, "exception", "OSError", "train.py:7 in step")
    trials = [trial(rank, rank // 4, 0, kind=away, alike=Alike.NODES, depth=0, resumed=0) for rank in range(0, 16, 2)]
    assert advise(trials, [], ALL).verdict is None


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        ("ConnectionResetError", True),
        ("requests.exceptions.ConnectTimeout", True),
        ("botocore.exceptions.ClientError", True),
        ("TimeoutError", True),
        ("FileNotFoundError", True),
        ("RuntimeError", False),
        ("ValueError", False),
        ("torch.AcceleratorError", False),
        ("was killed by SIGSEGV (segmentation fault)", False),
    ],
)
def test_what_comes_from_outside_of_the_job(error: str, passes: bool) -> None:
    assert may_pass(error) is passes


def test_failures_anywhere_at_any_step_are_chance() -> None:
    trials = [trial(rank, rank // 4, rank % 4, depth=37 * rank, resumed=0) for rank in (3, 9, 14, 5, 11, 2)]
    assert advise(trials, [], ALL).verdict is None


def test_a_checkpoint_is_named_once_a_round_from_an_earlier_one_has_passed() -> None:
    alike = [trial(rank, rank // 4, rank % 4, depth=7, resumed=4800, alike=Alike.NODES) for rank in (5, 9, 2)]
    possible = ALL._replace(checkpoint=True)
    assert advise(alike, [], possible) == Advice(
        change=Change.CHECKPOINT, suspect=Suspect(Cause.CHECKPOINT, number=4800)
    )
    found = advise(alike, [Passed(round=3, kind=KIND, resumed=4700)], possible).verdict
    assert found is not None
    assert found.suspect == Suspect(Cause.CHECKPOINT, number=4800)
    assert not found.stops


def test_the_same_history_has_the_same_answer() -> None:
    history = [trial(5, 1, 1), trial(5, 1, 1), trial(4, 1, 1)]
    assert advise(history, [], ALL) == advise(list(history), [], ALL)
