"""The autoscaler as a policy of a coordinator: from the reports of nodes to the next round."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from msgspec.structs import replace
from support.virtual_scaled import FLAT, KNEE, LIMITS, LINEAR, ScaledJob

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds import round_failures
from dlrover_run.features.autoscale.model import (
    AutoscaleAssignment,
    AutoscaleNodeReport,
    Condition,
    Measurement,
)
from dlrover_run.features.autoscale.observer import KEEPERS
from dlrover_run.features.node_check.rules import CHECK_ONCE, NodeCheckRules
from dlrover_run.features.registry import job_of
from dlrover_run.words.reasons import codes, render

HOUR = 3600.0


def begun(curve: dict[int, float], *names: str, **more: object) -> ScaledJob:
    """A job that trains with these nodes."""
    job = ScaledJob(curve, **more)  # type: ignore[arg-type]
    job.come(*(names or ("a", "b", "c", "d")))
    if job.plan.phase is PlanPhase.GATHERING:
        job.wait(31)
    return job


@pytest.mark.parametrize(
    ("curve", "sizes", "condition"),
    [
        (LINEAR, [4, 2, 4], Condition.LARGEST),
        # 3 nodes might do more than those on either side.
        (KNEE, [4, 2, 1, 3, 2], Condition.BEST),
        (FLAT, [4, 2, 1], Condition.BEST),
    ],
)
def test_a_job_goes_to_its_best_size(curve: dict[int, float], sizes: list[int], condition: Condition) -> None:
    job = begun(curve)
    job.settle_search()
    assert (job.sizes, job.state.condition) == (sizes, condition)
    assert job.plan.restart_count == 0


def test_nodes_that_are_not_wanted_are_spares_and_step_in() -> None:
    job = begun(KNEE)
    job.settle_search()
    assert job.ranks == ["a", "b"]
    assert job.waiting.text == "2 nodes train; this one waits to step in, 2 spares in all"
    job.lose("a")
    job.wait(2)
    assert len(job.ranks) == 2


def test_a_newcomer_waits_while_fewer_nodes_are_wanted() -> None:
    job = begun(KNEE, "a", "b", "c")
    job.run(3600, until=lambda: bool(job.state.table))
    job.come("d")
    job.settle_search()
    job.come("e", "f")
    job.run(60)
    assert job.ranks == ["a", "b"]


def test_newcomers_wait_from_the_first_round_on_until_its_size_was_measured() -> None:
    job = begun(LINEAR, "a")
    job.come("b")
    job.run(10)
    job.come("c", "d")
    job.run(HOUR, until=lambda: bool(job.state.table))
    assert job.sizes == [1]
    job.settle_search()
    assert len(job.ranks) == 4


def test_newcomers_do_not_wait_for_long_in_a_job_that_counts_no_steps() -> None:
    job = begun(LINEAR, "a")
    job.come("b")
    job.wait(LIMITS.node_timeout - 5)
    assert job.ranks == ["a"]
    job.wait(5)
    assert len(job.ranks) == 2
    job.come("c")
    assert len(job.ranks) == 3


def test_a_change_waits_for_a_checkpoint() -> None:
    job = begun(KNEE)
    job.mark("a")
    job.run(HOUR, until=lambda: job.state.target == 2)
    job.run(30)
    assert len(job.ranks) == 4
    job.mark(job.ranks[0])
    assert len(job.ranks) == 2
    assert "autoscale.trying" in codes(job.plan.reasons)
    assert codes(job.plan.reasons)[0] == "resized"


@pytest.mark.parametrize(("left", "sizes"), [(None, [4, 2, 1]), (1_000_000, [4, 2, 1]), (1_200, [4])])
def test_a_job_that_ends_soon_makes_no_change(left: int | None, sizes: list[int]) -> None:
    job = begun(FLAT)
    job.left = left
    job.run(600)
    assert job.sizes == sizes
    assert (job.state.condition is Condition.STOP) == (left == 1_200)


class TestOperator:
    def test_a_fixed_size_pauses_the_search_until_it_is_given_back(self) -> None:
        job = begun(FLAT)
        job.run(50)
        job.scale("3")
        job.run(300)
        assert (len(job.ranks), job.plan.wanted_nodes) == (3, 0)
        assert job.state.measurement == Measurement()
        assert job.state.table == ()
        job.request_auto()
        job.settle_search()
        assert len(job.ranks) == 1
        assert job.state.condition is Condition.BEST

    def test_the_whole_range_can_be_fixed_too(self) -> None:
        job = begun(FLAT)
        job.settle_search()
        assert len(job.ranks) == 1
        job.scale("4")
        assert len(job.ranks) == 4
        found = job.coordinator.status("resnet", job.now)
        assert (found.desired_nodes, found.desired_by) == ("4", "ann")
        assert found.size_choice is not None
        assert found.size_choice.paused

    def test_a_range_limits_the_sizes_that_are_chosen(self) -> None:
        job = begun(FLAT)
        job.scale("2:4")
        job.settle_search()
        assert len(job.ranks) == 2
        job.scale("3:4")
        assert len(job.ranks) == 3

    def test_without_the_policy_the_same_request_fixes_nothing(self) -> None:
        job = begun(FLAT, limits=replace(LIMITS, scaling=0))
        job.scale("4")
        assert job.plan.desired is None


class TestFailures:
    def test_a_size_at_which_workers_fail_is_left_at_no_cost(self) -> None:
        job = begun(LINEAR, "a", "b", max_restarts=0)
        job.failing = {4}
        job.run(HOUR, until=lambda: bool(job.state.table))
        job.come("c", "d")
        job.run(900)
        assert job.plan.phase is PlanPhase.TRAINING
        assert len(job.ranks) < 4
        assert 4 in job.sizes
        assert job.plan.restart_count == 0
        # A size that failed is tried once more, after a time.
        assert job.sizes.count(4) <= 2

    def test_the_reason_for_the_end_of_its_round_says_why_it_costs_nothing(self) -> None:
        job = begun(LINEAR, "a", "b", max_restarts=0)
        job.run(HOUR, until=lambda: bool(job.state.table))
        job.come("c", "d")
        job.run(HOUR, until=lambda: len(job.ranks) == 4)
        size = len(job.ranks)
        with patch.object(round_failures, "end_round", wraps=round_failures.end_round) as ended:
            job.fail_here()
        assert job.plan.restart_count == 0
        reasons = ended.call_args_list[0].args[3]
        assert codes(reasons) == ("worker_failed", "autoscale.tried_size")
        assert render(reasons).endswith(f"this costs no restart, as {size} nodes were only tried")

    def test_a_failure_of_a_size_that_was_measured_is_charged(self) -> None:
        job = begun(KNEE, max_restarts=1)
        job.settle_search()
        job.fail_here()
        assert (job.plan.restart_count, len(job.ranks)) == (1, 2)

    def test_a_failure_before_any_size_was_measured_is_charged(self) -> None:
        job = begun(KNEE, max_restarts=0)
        job.run(20)
        job.fail_here()
        assert job.plan.phase is PlanPhase.FAILED


class TestShortage:
    def test_nodes_that_are_not_here_are_requested_for_a_time(self) -> None:
        job = begun(LINEAR, "a")
        job.run(HOUR, until=lambda: job.state.target == 2)
        wish = job.coordinator.status("resnet", job.now).size_choice
        assert wish is not None
        assert wish.wanted_nodes == 2
        job.run(LIMITS.node_timeout + 30)
        assert (job.state.condition, job.state.target) == (Condition.STOP, 1)
        job.come("b")
        job.run(60)
        assert len(job.ranks) == 2

    def test_a_loss_changes_no_wish(self) -> None:
        job = begun(LINEAR)
        job.settle_search()
        job.lose("d")
        job.wait(2)
        assert (len(job.ranks), job.state.target) == (3, 4)
        job.come_back("d")
        job.run(20)
        assert len(job.ranks) == 4


class TestCoordinators:
    @pytest.mark.parametrize("moment", [40, 100, 155, 200, 260])
    def test_a_successor_with_the_plan_goes_on_where_the_last_one_was(self, moment: float) -> None:
        job, undisturbed = begun(KNEE), begun(KNEE)
        job.run(moment)
        table = job.state.table
        job.take_over(6, with_journal=True)
        assert job.state.table == table
        for each in (job, undisturbed):
            each.settle_search()
        assert job.sizes == undisturbed.sizes

    def test_a_successor_without_a_plan_knows_it_from_the_nodes(self) -> None:
        job = begun(KNEE)
        job.settle_search()
        state = job.state
        job.take_over(6, with_journal=False)
        job.wait(7)
        assert len(job.ranks) == 2
        assert {one.size for one in job.state.table} == {one.size for one in state.table}
        assert (job.state.target, job.state.condition) == (2, Condition.BEST)
        sizes = list(job.sizes)
        job.run(300)
        assert job.sizes == sizes

    def test_what_the_last_coordinator_has_found_counts_more_than_what_another_one_had(self) -> None:
        job = begun(KNEE)
        job.settle_search()
        old = replace(job.state, target=4, epoch=1, changed_at=1e6)
        job.report("d", parts=(AutoscaleNodeReport(known=old),))
        job.take_over(6, with_journal=False)
        job.wait(7)
        assert job.state.target == 2

    def test_a_takeover_in_the_pause_before_a_probe_repeats_nothing(self) -> None:
        job = begun(FLAT)
        job.run(HOUR, until=lambda: len(job.ranks) == 2)
        job.take_over(6, with_journal=True)
        job.settle_search()
        assert job.sizes == [4, 2, 1]


def test_a_round_begins_where_the_node_with_rank_0_counts_whatever_its_clock() -> None:
    job = begun(LINEAR)
    job.run(30)
    began = job.state.clock.began
    job.run(30)
    assert job.state.clock.began == began
    assert job.state.measurement.at is not None
    assert abs(job.state.measurement.at - (job.now - 1000.0)) < 20


def test_reports_of_other_nodes_and_of_other_rounds_are_no_measurement() -> None:
    job = begun(LINEAR)
    part = AutoscaleNodeReport(steps=50, seconds=5.0)
    here = replace(part, key=job.plan.key)
    job.report("b", parts=(here,))
    job.report("a", parts=(part,))
    assert job.state.measurement.first_at is None
    job.report("a", parts=(here,))
    assert job.state.measurement.first_at is not None


def test_only_a_few_nodes_keep_what_was_found_and_one_reports_steps() -> None:
    job = begun(KNEE)
    job.run(400)
    job.scale("4")
    parts = [AutoscaleAssignment.find(job.assignment(name).parts) for name in "abcd"]
    assert [part is not None for part in parts] == [True] * KEEPERS + [False]
    intervals = [getattr(part, "interval", 0.0) for part in parts]
    assert intervals[0] > 0
    assert set(intervals[1:]) == {0.0}


def test_a_measurement_changes_no_assignment() -> None:
    job = begun(LINEAR)
    job.run(30)
    before = [job.assignment(name) for name in "abcd"]
    stored = len(job.stored)
    job.run(30)
    assert len(job.stored) > stored
    assert [job.assignment(name) for name in "abcd"] == before


def test_a_decision_is_idempotent() -> None:
    job = begun(KNEE)
    for _ in range(60):
        job.run(5)
        assert not job.coordinator.advance(job.now)


def test_it_works_beside_the_health_check() -> None:
    both = JobRules(min_nodes=1, max_nodes=4, parts=(LIMITS,))
    both = replace(both, parts=with_part(both.parts, NodeCheckRules(check=CHECK_ONCE)))
    assert list(job_of(both).observers) == ["autoscale"]
    coordinator = Coordinator(both, 0.0, 1)
    assert coordinator.plan.wanted_nodes == 0
