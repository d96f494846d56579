"""The events of tasks, from the messages of their processes."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

from dlrover_run.events.records import (
    CheckpointRestored,
    CheckpointSeen,
    Event,
    Events,
    WorkerEvent,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerStarted,
)
from dlrover_run.failures.causes import Cause
from dlrover_run.failures.worker_exit import WorkerExit
from tf_ps_runner.agent.protocol import Ready, Restored, Saved, Step
from tf_ps_runner.agent.task_events import TaskEvents
from tf_ps_runner.cluster.model import EndCause, PlannedTask, Role, TaskEnd, TaskKey


class Emitted(Events):
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def take(self) -> list[Event]:
        """The events since the last call."""
        taken, self.events = self.events, []
        return taken


def task(role: Role, rank: int = 0, number: int = 0, version: int = 1) -> PlannedTask:
    return PlannedTask(
        key=TaskKey(role, number), rank=rank, version=version, node_id="a", incarnation="b", host="n01", since=0.0
    )


def process(code: int, stopped_with: signal.Signals | None = None) -> Any:
    return SimpleNamespace(pid=7, code=code, stopped_with=stopped_with, peak_memory=0)


def test_each_role_and_rank_has_a_place_that_its_replacement_uses() -> None:
    emitted = Emitted()
    events = TaskEvents(emitted)
    for each in (task(Role.PS), task(Role.WORKER, 1), task(Role.WORKER, 1, number=5, version=2), task(Role.EVALUATOR)):
        events.started(each, 7)
    found = [event for event in emitted.events if isinstance(event, WorkerStarted)]
    assert [(event.local_rank, event.role, event.rank, event.round, event.trains) for event in found] == [
        (0, "ps", 0, 1, True), (1, "worker", 1, 1, True), (1, "worker", 1, 2, True), (2, "evaluator", 0, 1, False),
    ]  # fmt: skip


def test_a_chief_restores_steps_and_saves() -> None:
    emitted = Emitted()
    events, chief = TaskEvents(emitted), task(Role.CHIEF)
    events.started(chief, 7)
    for message in (Restored(40, "checkpoint"), Step(41), Step(42), Saved(42, "/data/42"), Restored(42, "live")):
        events.message(chief, message)
    _, store, restored, step, saved = emitted.take()
    assert isinstance(store, WorkerReady)
    assert isinstance(step, WorkerReady)
    assert (store.stage, step.stage) == ("store", "step")
    assert restored == CheckpointRestored(step=40)
    assert saved == CheckpointSeen(round=1, rank=0, step=42)


def test_a_worker_that_served_the_chief_has_worked_since_it_was_ready() -> None:
    emitted = Emitted()
    events, worker = TaskEvents(emitted), task(Role.WORKER)
    events.started(worker, 7)
    events.message(worker, Ready())
    events.served(worker)
    *_, ready = emitted.take()
    assert isinstance(ready, WorkerReady)
    assert ready.stage == "step"
    assert ready.since is not None


def test_an_evaluator_works_from_its_start_and_a_server_from_its_first_answer() -> None:
    emitted = Emitted()
    events = TaskEvents(emitted)
    events.message(task(Role.EVALUATOR), Ready())
    events.works(task(Role.PS))
    events.works(task(Role.PS))
    assert [(event.role, event.stage) for event in emitted.events if isinstance(event, WorkerReady)] == [
        ("evaluator", "step"), ("ps", "step"),
    ]  # fmt: skip


def test_only_a_failure_is_reported_as_such_and_a_task_that_does_not_answer_as_stalled() -> None:
    emitted = Emitted()
    events, worker = TaskEvents(emitted), task(Role.WORKER)
    end = WorkerExit(rank=0, local_rank=0, pid=7, code=-9, unix_time=0.0)
    events.exited(worker, process(-15, signal.SIGTERM))
    events.ended(worker, TaskEnd(EndCause.RESHAPED, "left for a change of the cluster"), end)
    events.ended(worker, TaskEnd(EndCause.SILENT, "made no step"), end)
    events.ended(worker, TaskEnd(EndCause.FAILURE, "was killed by SIGKILL"), end)
    exited, stalled, failed = emitted.take()
    assert isinstance(exited, WorkerExited)
    assert (exited.code, exited.stopped_with, exited.failed) == (-15, "SIGTERM", False)
    assert isinstance(stalled, WorkerFailed)
    assert isinstance(failed, WorkerFailed)
    assert (stalled.cause, failed.cause) == (Cause.STALL, Cause.SIGNAL)
    assert (failed.name, failed.what) == ("worker 0", "was killed by SIGKILL")
    assert all(isinstance(event, WorkerEvent) and event.local_rank == 0 for event in (exited, stalled, failed))
