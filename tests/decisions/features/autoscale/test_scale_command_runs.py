"""When the command that starts and ends nodes runs, and on which node: decided by the coordinator of a job."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.virtual_scaled import FLAT, KNEE, LIMITS, LINEAR, ScaledJob

from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.features.autoscale.command import END_MARGIN, CommandKey, CommandRun, Demand, next_run
from dlrover_run.features.autoscale.model import Condition
from dlrover_run.features.operate.display.text import render_status

COMMAND = replace(LIMITS, command=1)
HOUR = 3600.0
NODE = NodeKey("a", "1")


def begun(curve: dict[int, float], *names: str, **more: object) -> ScaledJob:
    """A job with a command, that trains with these nodes."""
    job = ScaledJob(curve, COMMAND, **more)  # type: ignore[arg-type]
    job.come(*names)
    job.wait(31)
    return job


def test_it_runs_on_the_node_with_rank_0_when_more_nodes_are_wanted_than_are_here() -> None:
    job = begun(LINEAR, "a", "b")
    assert job.begun == {}
    job.run(HOUR, until=lambda: job.state.target == 4)
    job.run(20)
    assert list(job.begun.values()) == [("a", 4)]


def test_a_job_without_the_command_runs_none() -> None:
    job = ScaledJob(LINEAR)
    job.come("a", "b")
    job.wait(31)
    job.run(600)
    assert job.state.wish or job.state.target > 2
    assert job.begun == {}


def test_a_wish_that_stands_is_requested_once_in_half_an_hour() -> None:
    job = begun(LINEAR, "a")
    job.run(600)
    job.end_command()
    job.run(LIMITS.retry - 900)
    assert job.requested == [2]
    job.run(LIMITS.retry)
    assert job.requested == [2, 2]


def test_nodes_that_are_not_needed_are_given_back_at_the_end_of_the_search() -> None:
    job = begun(KNEE, "a", "b", "c", "d")
    while job.state.condition not in (Condition.BEST, Condition.LARGEST):
        assert job.requested == []
        job.run(10)
    job.run(30)
    assert list(job.begun.values()) == [(job.ranks[0], 2)]
    job.end_command()
    job.lose("c", "d")
    job.run(HOUR)
    assert job.requested == [2]


def test_spares_that_the_user_wants_are_requested_too() -> None:
    job = begun(KNEE, "a", "b", "c", "d", spares=1)
    job.settle_search()
    assert job.requested == [3]


def test_a_size_that_an_operator_fixes_is_requested_at_once() -> None:
    job = begun(FLAT, "a", "b")
    job.scale("4")
    job.run(20)
    assert job.requested == [4]
    job.end_command()
    job.scale("2")
    job.run(20)
    assert job.requested == [4, 2]


class TestOneAtATime:
    def test_a_second_run_waits_for_the_end_of_the_first(self) -> None:
        job = begun(FLAT, "a", "b")
        job.scale("4")
        job.run(10)
        job.scale("3")
        job.run(10)
        job.scale("1")
        job.run(10)
        assert job.requested == [4]
        job.end_command()
        job.run(10)
        # The latest wish counts.
        assert job.requested == [4, 1]

    def test_a_node_that_reports_no_end_holds_up_the_next_run_for_a_limited_time(self) -> None:
        job = begun(FLAT, "a", "b")
        job.scale("4")
        job.run(10)
        job.scale("3")
        job.run(COMMAND.command_timeout + END_MARGIN - 20)
        assert job.requested == [4]
        job.run(30)
        assert job.requested == [4, 3]

    def test_a_run_whose_node_is_lost_is_given_to_no_other_node(self) -> None:
        job = begun(LINEAR, "a", "b", "c")
        job.run(HOUR, until=lambda: bool(job.begun))
        assert list(job.begun.values()) == [("a", 4)]
        job.lose("a")
        job.run(HOUR / 4)
        assert job.ranks[0] != "a"
        assert list(job.begun.values()) == [("a", 4)]
        job.run(HOUR / 2)
        # The wish stands, so it is requested again later.
        assert [nodes for name, nodes in job.begun.values() if name != "a"] == [4]

    def test_another_rank_0_changes_nothing(self) -> None:
        job = begun(FLAT, "a", "b", "c")
        job.scale("4")
        job.run(10)
        job.lose("a")
        job.wait(3)
        job.come("a", incarnation="2")
        job.run(20)
        assert list(job.begun.values()) == [("a", 4)]


class TestCoordinators:
    @pytest.mark.parametrize("with_journal", [True, False])
    def test_a_successor_repeats_no_run(self, with_journal: bool) -> None:
        job = begun(LINEAR, "a", "b")
        job.run(HOUR, until=lambda: bool(job.begun))
        job.take_over(6, with_journal)
        job.wait(7)
        job.run(20)
        job.end_command()
        job.run(300)
        assert job.requested == [4]

    def test_runs_of_two_coordinators_are_never_the_same(self) -> None:
        run = next_run(None, Demand(4, 2), NODE, 5, 30, 1800, 0)
        assert run == CommandRun(CommandKey(5, 1), 4, NODE, 30, 0)
        other = next_run(None, Demand(4, 2), NODE, 6, 30, 1800, 0)
        assert other is not None
        assert other.key != run.key


def test_the_status_says_that_it_has_failed() -> None:
    job = begun(LINEAR, "a")
    job.run(HOUR, until=lambda: bool(job.begun))
    for failed in (False, True):
        job.results.clear()
        job.run(2 * HOUR, until=lambda: job.state.command is not None and job.state.command.failed is None)
        job.end_command(failed=failed)
        status = job.coordinator.status("resnet", job.now)
        assert status.size_choice is not None
        assert status.size_choice.command_failed == failed
        assert ("--scale-command has failed" in render_status(status)) == failed
