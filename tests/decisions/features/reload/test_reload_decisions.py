"""When a job with `--reload` ends a round, holds the next one, and goes on."""

from __future__ import annotations

import os

import pytest
from msgspec.structs import replace
from support.virtual_torch import KILLED, TorchJob, rules

from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.features.registry import job_of
from dlrover_run.features.reload.model import ReloadReport, ReloadState
from dlrover_run.features.reload.rules import ReloadRules
from dlrover_run.features.reload.text import ReloadCode
from dlrover_run.words.reasons import Code

RULES = rules(1, 2, parts=(ReloadRules(enabled=1),), last_call_timeout=1.0)
SAVED = (ReloadCode.SAVED(names=("train.py",), number=1),)


def started(*names: str) -> TorchJob:
    job = TorchJob(RULES)
    job.come(*names, parts=(ReloadReport(),))
    job.wait(2)
    assert job.round() == ["1", *names]
    return job


def save(job: TorchJob, *names: str) -> None:
    for name in names:
        job.report(name, parts=(ReloadReport(os.urandom(4).hex(), SAVED),))


def test_a_job_without_the_flag_has_no_such_observer() -> None:
    assert "reload" not in job_of(rules(1, 1, parts=(ReloadRules(),))).observers
    assert "reload" in job_of(RULES).observers


def test_a_save_ends_the_round_and_begins_the_next_one_without_a_charge() -> None:
    job = started("a")
    for number in range(2, 6):
        save(job, "a")
        assert job.round() == [str(number), "a"]
        assert (job.plan.restart_count, job.plan.reasons) == (0, SAVED)


def test_all_nodes_see_a_save_and_it_is_one_restart() -> None:
    job = started("a", "b")
    first = job.ranks[0]
    save(job, "b", "a")
    assert job.round() == ["2", *job.ranks]
    save(job, *(name for name in job.ranks if name != first))
    assert job.round() == ["2", *job.ranks]


def test_a_failure_is_no_charge_and_waits_for_the_next_save() -> None:
    job = started("a")
    job.fail("a", replace(KILLED, rank=0, host="a", node_rank=0))
    assert job.plan.phase is PlanPhase.GATHERING
    assert [reason.code for reason in job.plan.reasons] == [Code.WORKER_FAILED.code, ReloadCode.AFTER_FAILURE.code]
    waiting = job.assignment("a").waiting
    assert waiting is not None
    assert (waiting.reasons, waiting.seconds) == ((ReloadCode.AFTER_FAILURE(),), None)
    job.wait(100_000)
    assert (job.plan.phase, job.plan.restart_count) == (PlanPhase.GATHERING, 0)
    save(job, "a")
    assert (job.round(), job.plan.reasons, job.plan.failure) == (["2", "a"], SAVED, None)


def test_a_failure_for_which_the_file_was_saved_already_does_not_wait() -> None:
    """The save comes after the start, and the failure before the next one."""
    job = started("a")
    save(job, "a")
    job.fail("a", replace(KILLED, rank=0, host="a", node_rank=0))
    assert job.plan.phase is PlanPhase.GATHERING, "this one is of the second round"
    save(job, "a")
    assert job.round() == ["3", "a"]


def test_workers_that_have_all_succeeded_wait_for_the_next_save_too() -> None:
    job = started("a", "b")
    job.succeed("a", "b")
    assert job.plan.reasons == (ReloadCode.AFTER_SUCCESS(),)
    job.wait(100_000)
    save(job, job.ranks[0])
    assert job.round()[0] == "2"


def test_a_node_that_is_lost_ends_the_round_as_in_any_job() -> None:
    job = started("a", "b")
    lost, left = job.ranks
    job.lose(lost)
    job.wait(60)
    assert job.round() == ["2", left]
    save(job, left)
    assert job.round() == ["3", left]


def test_a_job_that_waits_ends_with_its_last_node() -> None:
    job = started("a")
    job.succeed("a")
    job.lose("a")
    job.wait(600)
    assert job.is_over


@pytest.mark.parametrize("token", ["", "1"])
def test_a_plan_that_is_rebuilt_takes_what_was_reported_as_seen(token: str) -> None:
    job = started("a")
    if token:
        save(job, "a")
    before = job.plan.key
    found = job_of(RULES).observers["reload"].recovered(job.plan, job.coordinator.nodes)
    assert found == ReloadState(before, ReloadReport.get(job.statuses["a"].parts).token)
