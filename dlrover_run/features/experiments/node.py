"""What a node does for experiments: it reports where its first worker failed and how, and orders their devices."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from glob import glob
from typing import Any

from msgspec.structs import replace

from dlrover_run.agent.framework import AgentServices, FrameworkAdapter
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import RoundKey
from dlrover_run.failures.causes import root_cause
from dlrover_run.failures.guard import guarded
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.features.experiments.kinds import kind_of
from dlrover_run.features.experiments.model import ExperimentsAssignment, ExperimentsReport, FailedWorker
from dlrover_run.workers.feature import WorkersFeature
from dlrover_run.workers.round import WorkerRound

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Experiments(WorkersFeature):
    """Follows each round of workers of the node."""

    def __init__(self, services: AgentServices, tasks: FrameworkAdapter[Any]) -> None:
        super().__init__(services, tasks)
        self._devices = visible_devices(os.environ)
        self._order: Sequence[int] = ()
        self._round: WorkerRound | None = None
        self._failed: FailedWorker | None = None
        self._judged: RoundKey | None = None
        """The last round whose failure was looked at."""

    def follow(self, assignment: Assignment, shutting_down: bool) -> None:
        part = ExperimentsAssignment.find(assignment.parts)
        if part is not None and not part.refused:
            self._order = part.order

    def environment(self, key: RoundKey, local_rank: int) -> Mapping[str, str]:
        return {VISIBLE: ",".join(ordered(self._devices, self._order))} if self._order else {}

    def round_begins(self, workers: WorkerRound) -> None:
        self._round = workers

    def round_ends(self) -> None:
        """All workers have ended: whether several of them failed in the same way. Where another node was first, the
        workers of this one may have failed too, before they were stopped."""
        current = self._round
        if current is None or not current.ends:
            return
        if self._judged != current.key and (end := root_cause(current.ends)) is not None:
            self._judged = current.key
            self._failed = guarded("the kind of a failure", partial(self._describe, current, end), None)
        failed = self._failed
        if failed is None or failed.key != current.key or failed.several is not None:
            return
        kinds = [guarded("the kind of a failure", partial(kind_of, end), None) for end in current.ends if end.failed]
        alike = sum(kind is not None and kind.digest == failed.kind.digest for kind in kinds)
        self._failed = replace(failed, several=alike > 1)
        self._services.wake()

    def add_to_report(self, report: NodeReport) -> NodeReport:
        current = self._round
        end = None if current is None or report.failure is None else current.failure
        if current is not None and end is not None and self._judged != current.key:
            self._judged = current.key
            self._failed = guarded("the kind of a failure", partial(self._describe, current, end), None)
        workers = 0 if current is None else current.ranks.workers
        job = self._services.job
        movable = 2 <= workers <= len(self._devices) and job.numa_binding is None
        # The nodes of --local-nodes have a rank and a name on the console from their supervisor.
        part = ExperimentsReport(self._failed, movable, job.node_rank is None or bool(job.console_name))
        return replace(report, parts=with_part(report.parts, part))

    def _describe(self, current: WorkerRound, end: WorkerExit) -> FailedWorker | None:
        kind = kind_of(end)
        if kind is None:
            return None
        worker = current.specs.workers[end.local_rank]
        visible = visible_devices(worker.environment)
        progress = current.progress.by_name().get(worker.name)
        return FailedWorker(
            key=current.key,
            kind=kind,
            rank=end.rank,
            local_rank=end.local_rank,
            device=f"GPU {visible[end.local_rank]}"[:80] if end.local_rank < len(visible) else "",
            depth=None if progress is None else progress.steps,
        )


def visible_devices(environment: Mapping[str, str]) -> list[str]:
    """The devices of a node as CUDA programs count them: those of the variable, else all that the machine has."""
    given = environment.get(VISIBLE)
    if given is None:
        return [str(place) for place in range(len(glob("/dev/nvidia[0-9]*")))]
    return [name for each in given.split(",") if (name := each.strip())]


def ordered(devices: Sequence[str], order: Sequence[int]) -> list[str]:
    """The devices in that order, and those that it does not have as they were."""
    if sorted(order) != list(range(len(order))) or len(order) > len(devices):
        return list(devices)
    return [devices[place] for place in order] + list(devices[len(order) :])


NODE = Experiments
