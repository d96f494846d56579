"""The events that follow from two assignments of one node."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.scripted_agent import Emitted, rank_assignment

from dlrover_run.coordination.records.assignment import Assignment, Waiting
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.round import Failure
from dlrover_run.events.event_log import AssignmentEvents, changes, event_log_path
from dlrover_run.events.records import (
    CheckEnded,
    CheckStarted,
    CoordinatorChanged,
    JobEnded,
    NodeWaiting,
    RoundClosed,
    RoundFormed,
    WorkerProgress,
)
from dlrover_run.features.node_check.decision.model import (
    CheckKey,
    CheckTask,
    HealthStatus,
    NodeCheckAssignment,
    NodeHealth,
)
from dlrover_run.features.node_check.node import CheckEvents
from dlrover_run.output.run_directory import RunDir
from dlrover_run.spec import Entrypoint, JobSpec, LogSpec
from dlrover_run.words.reasons import Code


def training(number: int, restarts: int = 0, failure: Failure | None = None, epoch: int = 1) -> Assignment:
    ranks = rank_assignment(number, restart_count=restarts, node_rank=1, nodes=2, workers=4, first_rank=4, world_size=8)
    reasons = () if failure is None else (failure.reason,)
    return Assignment(
        epoch=epoch, phase=PlanPhase.TRAINING, key=ranks.key, restart_count=restarts, ranks=ranks, failure=failure,
        reasons=reasons,
    )  # fmt: skip


def waiting(number: int) -> Assignment:
    reasons = (Code.NODES_OF(number=number, wanted=4),)
    return Assignment(epoch=1, waiting=Waiting(reasons=reasons, seconds=30.0), reasons=reasons)


def test_the_first_round() -> None:
    (event,) = changes(Assignment(), training(1))
    assert isinstance(event, RoundFormed)
    assert (event.round, event.node, event.first_rank, event.workers, event.failed_rank) == (1, 1, 4, 4, None)


def test_an_assignment_that_comes_again_is_no_event() -> None:
    for assignment in (Assignment(), training(1), waiting(1)):
        assert changes(assignment, assignment) == []


def test_a_failure_closes_a_round_and_names_its_rank() -> None:
    closed, formed = changes(training(1), training(2, 1, Failure(rank=5, host="n02", exit_text="raised KeyError: 1")))
    assert isinstance(closed, RoundClosed)
    assert isinstance(formed, RoundFormed)
    assert closed.failed
    assert (closed.round, formed.round, formed.failed_rank, formed.restarts) == (1, 2, 5, 1)


def test_a_node_that_waits_writes_an_event_when_the_codes_change() -> None:
    closed, waits = changes(training(1), waiting(2))
    assert isinstance(closed, RoundClosed)
    assert isinstance(waits, NodeWaiting)
    assert changes(waiting(2), waiting(3)) == []


def test_another_coordinator() -> None:
    assert changes(training(1), training(1, epoch=3)) == [CoordinatorChanged(epoch=3, before=1)]


@pytest.mark.parametrize("phase", [PlanPhase.FINISHED, PlanPhase.FAILED])
def test_the_end_of_the_job_is_written_once(phase: PlanPhase) -> None:
    over = msgspec.structs.replace(training(1), phase=phase, ranks=None)
    ended, closed = changes(training(1), over)
    assert isinstance(closed, RoundClosed)
    assert closed.failed == (phase is PlanPhase.FAILED)
    assert ended == JobEnded(phase=phase.value)
    assert changes(over, over) == []


@pytest.mark.parametrize(
    ("journal", "log_dir", "kept", "path"),
    [
        (None, None, False, "/state/dlrover-run/events/"),
        (None, None, True, "/state/dlrover-run/events/"),
        (None, "logs", True, "/run/events.jsonl"),
        ("/dev/null", "logs", True, None),
        ("/j", None, False, "/j/"),
        ("/j", "logs", True, "/j/"),
    ],
)
def test_where_the_log_is(
    journal: str | None, log_dir: str | None, kept: bool, path: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    job = JobSpec(Entrypoint("script", "train.py"), run_id="../a b", journal=journal, logs=LogSpec(log_dir=log_dir))
    found = event_log_path(job, RunDir("/run", keep=kept))
    if path is None:
        assert found is None
    elif path.endswith("/"):
        assert found is not None
        assert found.parent == Path(path)
        assert found.name.startswith(".._a_b.")
        assert found.name.endswith(".events.jsonl")
    else:
        assert found == Path(path)


def test_a_health_check_begins_with_the_first_task_and_ends_with_the_result() -> None:
    def health(status: HealthStatus) -> NodeHealth:
        return NodeHealth(node_id="a", incarnation="b", host="n01", status=status, reason="it is slow")

    task = CheckTask(key=CheckKey(1, 1, 0), node=0, compute=True, links=(), timeout=60.0)
    emitted = Emitted()
    check = CheckEvents(emitted)
    for part in (
        NodeCheckAssignment(),
        NodeCheckAssignment(check_task=task),
        NodeCheckAssignment(health=health(HealthStatus.PENDING)),
        NodeCheckAssignment(check_task=task, health=health(HealthStatus.PENDING)),
        NodeCheckAssignment(health=health(HealthStatus.STRAGGLER)),
        NodeCheckAssignment(health=health(HealthStatus.STRAGGLER)),
    ):
        check.follow(part)
    assert emitted.events == [CheckStarted(), CheckEnded(status="straggler", reason="it is slow")]


def test_what_workers_have_done_is_written_before_the_end_of_their_round() -> None:
    emitted = Emitted()
    done = WorkerProgress(round=1, rank=4, local_rank=0)
    follower = AssignmentEvents(emitted, lambda: emitted.emit(done))
    for assignment in (training(1), training(1), training(2, 1)):
        follower.follow(assignment)
    assert [type(event) for event in emitted.events] == [RoundFormed, WorkerProgress, RoundClosed, RoundFormed]
