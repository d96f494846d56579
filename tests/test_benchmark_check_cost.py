"""`benchmarks/check_cost.py`: its pure parts, and that the check can be timed without a job. No time is asserted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from check_cost_bench.added import subtract
from check_cost_bench.cases import CASES, STEPS
from check_cost_bench.contenders import ADDED, TASK, WITH, WITHOUT, Task, launcher
from comparison.ratios import Sample, summarise
from launch import run_once
from launch_bench.case import Limits
from launch_bench.rivals import Job


def sample(rival: str, turn: int, value: float | None, unended: bool = False) -> Sample:
    return Sample(rival, turn, None if value is None else {"": value}, unended=frozenset({""} if unended else ()))


def test_what_is_added_is_the_difference_of_each_turn() -> None:
    samples = [sample(WITH, 1, 3.0), sample(WITHOUT, 1, 1.0), sample(WITH, 2, 9.0), sample(WITHOUT, 2, 8.0)]
    assert [one.values for one in subtract(ADDED, WITH, WITHOUT, samples)] == [{"": 2.0}, {"": 1.0}]


def test_a_turn_in_which_one_was_lost_or_did_not_end_has_no_difference() -> None:
    for lost in (sample(WITHOUT, 1, None), sample(WITHOUT, 1, 60.0, unended=True)):
        assert [one.values for one in subtract(ADDED, WITH, WITHOUT, [sample(WITH, 1, 3.0), lost])] == [None]


def test_what_is_added_is_judged_by_the_task_of_the_same_turn() -> None:
    samples = [sample(TASK, 1, 2.0), sample(WITH, 1, 4.0), sample(WITHOUT, 1, 1.0)]
    samples += subtract(ADDED, WITH, WITHOUT, samples)
    rows = {row.title: row for row in summarise(samples, TASK, {(ADDED, ""): 1.5})}
    assert (rows[ADDED].ratio, rows[ADDED].reached) == (1.5, True)


def test_the_contenders_of_a_case_differ_in_the_flag_alone() -> None:
    without, checked = (launcher(flag, "--start-method=spawn").commands(Job("x.py", 2))[0] for flag in (False, True))
    assert [word for word in checked if word != "--network-check"] == without
    assert "--network-check" in checked
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.torchrun
@pytest.mark.parametrize("workers", [1, 2])
def test_the_task_itself_is_done_and_timed_in_its_parts(workers: int) -> None:
    case = next(case for case in CASES if case.name == f"start-preload-nothing-{workers}")
    values = run_once(case, Task(), 1, Limits()).values
    assert values is not None
    assert values.keys() == {"", *STEPS}
    assert values[""] == pytest.approx(sum(values[step] for step in STEPS))
