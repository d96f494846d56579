"""Experiments in the decisions of a job: what the next round changes, who leaves, and when no round follows."""

from __future__ import annotations

from typing import Any

import pytest
from support.virtual_torch import TorchJob, rules

from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.round import Failure
from dlrover_run.exit_reasons import ExitReason
from dlrover_run.features.experiments.kinds import Kind
from dlrover_run.features.experiments.model import (
    ExperimentsAssignment,
    ExperimentsReport,
    ExperimentsState,
    FailedWorker,
)
from dlrover_run.features.experiments.rules import ExperimentsRules
from dlrover_run.features.registry import job_of
from dlrover_run.features.survivors.rules import SurvivorsRules
from dlrover_run.words.reasons import codes

ON = ExperimentsRules(on=1)
KIND = Kind("0" * 16, "exception", "RuntimeError", "train.py:7 in step")
WORKERS = 4


class Experimented(TorchJob):
    """Nodes of four workers, whose device is that of the order that they were assigned."""

    def __init__(self, *nodes: str, parts: tuple[Any, ...] = (ON,), devices: bool = True, ranks: bool = True) -> None:
        size = len(nodes)
        super().__init__(rules(2, size, parts=parts, last_call_timeout=1.0, max_restarts=8, early_failure_limit=0))
        self.offer = ExperimentsReport(devices=devices, ranks=ranks)
        self.come(*nodes, workers=WORKERS, parts=(self.offer,))
        self.wait(2)

    def part(self, node: str) -> ExperimentsAssignment:
        return ExperimentsAssignment.get(self.assignment(node).parts)

    def fails(self, node: str, local_rank: int, **more: Any) -> None:
        """A worker of a node fails; two seconds later the next round runs, if one does."""
        order = self.part(node).order or tuple(range(WORKERS))
        rank = self.ranks.index(node) * WORKERS + local_rank
        more = {"kind": KIND, "device": f"GPU {order[local_rank]}", "several": False} | more
        failed = FailedWorker(key=self.plan.key, rank=rank, local_rank=local_rank, **more)
        offer = ExperimentsReport(failed, self.offer.devices, self.offer.ranks)
        self.report(node, parts=(offer,))
        self.fail(node, Failure(rank=rank, host=node, exit_text="raised RuntimeError: x"))
        self.wait(2)

    def fails_on_device(self, node: str, device: int) -> None:
        self.fails(node, (self.part(node).order or tuple(range(WORKERS))).index(device))

    @property
    def said(self) -> list[str]:
        """The codes of this round that are not the failure's."""
        return [code for code in codes(self.plan.reasons) if code.startswith("experiments.")]


def test_without_the_flag_there_is_no_such_observer() -> None:
    assert "experiments" not in job_of(rules(1, 1, parts=(ExperimentsRules(),))).observers
    assert "experiments" in job_of(rules(1, 1, parts=(ON,))).observers


def test_one_failure_and_other_kinds_change_nothing() -> None:
    job = Experimented("a", "b")
    job.fails("b", 1)
    job.fails("b", 1, kind=Kind("1" * 16, "exception", "KeyError", "x"))
    assert job.said == []
    assert job.part("b").order == ()
    assert job.plan.restart_count == 2


def test_the_second_one_exchanges_two_devices_of_its_node_for_one_line() -> None:
    job = Experimented("a", "b")
    job.fails("b", 1)
    job.fails("b", 1)
    assert job.said == ["experiments.devices"]
    assert "ranks 5 and 6 exchange their GPUs" in job.plan.reason
    assert job.part("b").order == (0, 2, 1, 3)
    assert job.part("a").order == ()
    assert ExperimentsState.get(job.plan.parts).note == ()


def test_what_follows_a_device_ends_its_node_with_the_code_of_a_faulty_one_and_the_others_go_on() -> None:
    job = Experimented("a", "b", "c", "d")
    while not job.part("b").refused:
        assert job.plan.restart_count < 6
        job.fails_on_device("b", 1)
    assert sorted(job.ranks) == ["a", "c", "d"]
    assert "it follows node 1 (b), each time on its GPU 1" in job.plan.reason
    dismissal = job.part("b").dismissal
    assert dismissal is not None
    assert dismissal.exit_reason is ExitReason.FAULTY_NODE
    assert ExperimentsState.get(job.plan.parts).trials == ()
    # Another process on that host is another node.
    job.leave("b")
    job.come("b", incarnation="2", workers=WORKERS, parts=(job.offer,))
    job.wait(60)
    assert "b" in job.ranks


def test_what_follows_a_rank_stops_before_the_restarts_are_used() -> None:
    job = Experimented("a", "b", "c", "d")
    while job.plan.phase is PlanPhase.TRAINING:
        job.fails(job.ranks[1], 2)
    assert job.plan.phase is PlanPhase.FAILED
    assert job.plan.restart_count < 5
    assert codes(job.plan.reasons)[1] == "experiments.rank"
    assert "stopped instead of" in job.plan.reason
    left = 8 - job.plan.restart_count
    assert f"stopped instead of {left} more restarts" in job.plan.reason


def test_what_all_nodes_fail_with_at_one_step_is_the_code() -> None:
    job = Experimented("a", "b")
    for _ in range(8):
        if job.plan.phase is not PlanPhase.TRAINING:
            break
        other = FailedWorker(key=job.plan.key, kind=KIND, rank=0, local_rank=0, device="GPU 0", several=True)
        job.report("a", parts=(ExperimentsReport(other, True, True),))
        job.fails("b", 1, several=True, depth=400)
    assert job.plan.restart_count < 5
    assert job.plan.phase is PlanPhase.FAILED
    assert "experiments.code" in codes(job.plan.reasons)


@pytest.mark.parametrize("fixed", ["devices", "ranks", "both", "survivors"])
def test_what_the_user_has_fixed_is_not_changed(fixed: str) -> None:
    parts = (ON, SurvivorsRules(reconfigure_timeout=10.0)) if fixed == "survivors" else (ON,)
    devices, ranks = fixed not in ("devices", "both"), fixed not in ("ranks", "both")
    job = Experimented("a", "b", parts=parts, devices=devices, ranks=ranks)
    for _ in range(3):
        job.fails("b", 1)
        if fixed != "ranks":
            assert job.part("b").order == ()
        if fixed != "devices":
            assert job.ranks == ["a", "b"]


def test_no_restart_is_added_and_none_is_free() -> None:
    job = Experimented("a", "b", devices=False, ranks=False)
    for used in range(1, 9):
        job.fails("b" if used % 2 else "a", used % 3, kind=Kind(f"{used:016x}", "exception"))
        assert job.plan.restart_count == used
    assert job.plan.phase is PlanPhase.TRAINING
    job.fails("b", 1)
    assert job.plan.phase is PlanPhase.FAILED


def test_a_successor_with_the_journal_goes_on() -> None:
    job = Experimented("a", "b")
    job.fails("b", 1)
    job.succeed_by_another(6, with_journal=True)
    job.come_back("a", "b")
    job.fails("b", 1)
    assert job.said == ["experiments.devices"]
