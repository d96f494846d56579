"""What the tasks of this node do, as events of the event log."""

from __future__ import annotations

import time
from typing import Any

from dlrover_run.coordination.records.bounds import MAX_TRACE
from dlrover_run.events.records import (
    CheckpointRestored,
    CheckpointSeen,
    Events,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerResumed,
    WorkerStalled,
    WorkerStarted,
)
from dlrover_run.failures import causes
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.processes import tree
from dlrover_run.processes.process import ManagedProcess
from dlrover_run.words.reasons import Reasons
from tf_ps_runner.agent.protocol import Ready, Restored, Saved, Step, TaskEvent
from tf_ps_runner.cluster.model import EndCause, PlannedTask, Role, TaskEnd, TaskKey
from tf_ps_runner.cluster.rules import ROLES

FREE = frozenset({EndCause.SUCCESS, EndCause.RESHAPED})
"""Ends that are no failures."""


class TaskEvents:
    """Emits the events of tasks. Each role and rank gets a place of its own on this node, in the order in which they
    first run here; the version of the cluster takes the part of the round."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._places: dict[tuple[Role, int], int] = {}
        self._ready: dict[TaskKey, float] = {}
        self._working: set[TaskKey] = set()

    def started(self, task: PlannedTask, pid: int) -> None:
        trains = not ROLES[task.role].outlives_versions
        self._events.emit(WorkerStarted(**self._worker(task), pid=pid, since=tree.start_of(pid), trains=trains))

    def message(self, task: PlannedTask, event: TaskEvent) -> None:
        if isinstance(event, Ready) and ROLES[task.role].outlives_versions:
            self.works(task)
        elif isinstance(event, Ready | Restored) and task.key not in self._ready:
            self._ready[task.key] = time.monotonic()
            self._events.emit(WorkerReady(**self._worker(task), stage="store"))
        if isinstance(event, Restored) and event.how != "live" and event.step >= 0:
            self._events.emit(CheckpointRestored(step=event.step))
        elif isinstance(event, Saved):
            self._events.emit(CheckpointSeen(round=task.version, rank=task.rank, step=event.step))
        elif isinstance(event, Step):
            self.works(task)

    def works(self, task: PlannedTask, since: float | None = None) -> None:
        """It has made a step, or serves others. Idempotent."""
        if task.key not in self._working:
            self._working.add(task.key)
            self._events.emit(WorkerReady(**self._worker(task), stage="step", since=since))

    def served(self, task: PlannedTask) -> None:
        """It has made no steps of its own, because it has worked for the chief since it was ready."""
        self.works(task, self._ready.get(task.key))

    def stalled(self, task: PlannedTask, since: float, reasons: Reasons, guilty: bool) -> None:
        """It makes no progress, for the reasons if it is `guilty` of that itself."""
        self._events.emit(
            WorkerStalled(**self._worker(task), since=since, reasons=reasons if guilty else (), guilty=guilty)
        )

    def resumed(self, task: PlannedTask) -> None:
        self._events.emit(WorkerResumed(**self._worker(task)))

    def exited(self, task: PlannedTask, process: ManagedProcess[Any]) -> None:
        self._ready.pop(task.key, None)
        self._working.discard(task.key)
        stopped_with = "" if process.stopped_with is None else process.stopped_with.name
        self._events.emit(
            WorkerExited(
                **self._worker(task),
                pid=process.pid,
                code=process.code or 0,
                stopped_with=stopped_with,
                peak_memory=process.peak_memory,
            )
        )

    def ended(self, task: PlannedTask, reported: TaskEnd, end: WorkerExit) -> None:
        if reported.cause in FREE:
            return
        cause = causes.Cause.STALL if reported.cause is EndCause.SILENT else causes.cause_of(end)
        self._events.emit(
            WorkerFailed(
                **self._worker(task),
                pid=end.pid,
                code=end.code,
                cause=cause,
                what=reported.exit_text,
                trace=reported.trace[-MAX_TRACE:],
            )
        )

    def _worker(self, task: PlannedTask) -> dict[str, Any]:
        place = self._places.setdefault((task.role, task.rank), len(self._places))
        return {"round": task.version, "rank": task.rank, "local_rank": place, "role": task.role.value}
