"""What an agent adds to a job that scales itself: the throughput of its workers, and the command that starts nodes.

Imported only by an agent whose job scales itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from dlrover_run.agent.framework import AgentServices, FrameworkAdapter
from dlrover_run.agent.result import JobResult
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.bounds import MAX_TOTAL
from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.plan import OVER
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import RankAssignment, RoundKey
from dlrover_run.features.autoscale.model import AutoscaleAssignment, AutoscaleNodeReport
from dlrover_run.features.autoscale.scale_command import ScaleCommand
from dlrover_run.features.autoscale.settings import AutoscaleSettings
from dlrover_run.observe.page import Progress
from dlrover_run.observe.tick import Activities, Consumer, Tick
from dlrover_run.workers.feature import WorkersFeature
from dlrover_run.workers.round import WorkerRound


class Autoscaler(WorkersFeature):
    """Both together."""

    def __init__(self, services: AgentServices, tasks: FrameworkAdapter[Any]) -> None:
        super().__init__(services, tasks)
        spec, log, on_end = services.job, services.console.info, services.orphans.kill_session
        self._workers: WorkerRound | None = None
        self._throughput = ThroughputReport(services.tick, self._runs, services.wake)
        self._command = ScaleCommand(
            spec.settings_of("autoscale", AutoscaleSettings).command,
            spec.run_id,
            os.environ,
            log,
            services.wake,
            on_end,
            services.events,
        )

    @property
    def pids(self) -> set[int]:
        return self._command.pids

    def round_begins(self, workers: WorkerRound) -> None:
        self._workers = workers

    def follow(self, assignment: Assignment, shutting_down: bool) -> None:
        self._throughput.follow(assignment, shutting_down)
        self._command.follow(assignment, shutting_down)

    def add_to_report(self, report: NodeReport) -> NodeReport:
        return self._command.add_to_report(self._throughput.add_to_report(report))

    async def close(self, result: JobResult) -> None:
        self._throughput.close()
        await self._command.close()

    def _runs(self, key: RoundKey) -> bool:
        """Whether the workers that run are of that round."""
        workers = self._workers
        return workers is not None and workers.key == key and workers.group.live


NODE = Autoscaler


class ThroughputReport:
    """What this node reports of the steps of its workers, as often as its assignment says.

    `tick` gives samples of the workers by name, in the order of their ranks, `runs` says whether those that run are of
    a round, and `wake` has a report built. `clock` gives nanoseconds as `time.monotonic_ns`.
    """

    def __init__(
        self,
        tick: Tick,
        runs: Callable[[RoundKey], bool],
        wake: Callable[[], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._tick = tick
        self._runs = runs
        self._wake = wake
        self._clock = clock
        self._assignment = Assignment()
        self._interval = 0.0
        self._consumer: Consumer | None = None
        self._part = AutoscaleNodeReport()
        self._first: tuple[RoundKey, int] = (RoundKey(), 0)

    def follow(self, assignment: Assignment, shutting_down: bool) -> None:
        """Take the latest assignment. What is to be kept stays until something else is to be kept: a coordinator that
        has lost its records asks for nothing. Idempotent."""
        self._assignment = assignment
        part = AutoscaleAssignment.find(assignment.parts)
        if part is not None and part.known is not None:
            self._part = replace(self._part, known=part.known)
        wanted = (
            0.0
            if part is None or shutting_down or assignment.phase in OVER or assignment.ranks is None
            else part.interval
        )
        if wanted != self._interval:
            self._interval = wanted
            self.close()
            if wanted:
                self._consumer = self._tick.add("the throughput", self._take, first=wanted)

    def add_to_report(self, report: NodeReport) -> NodeReport:
        """The report with what was read last, and what is to be kept."""
        part = self._part
        if not report.in_round(part.key):
            part = AutoscaleNodeReport(known=part.known)
        return report if part == AutoscaleNodeReport() else replace(report, parts=with_part(report.parts, part))

    def close(self) -> None:
        """Read no more. Idempotent."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _take(self, sample: Activities) -> float:
        ranks = self._assignment.ranks
        first_rank = next(iter(sample.values()), None)
        if ranks is not None and first_rank is not None and self._runs(ranks.key):
            self._note(ranks, first_rank.progress)
        return self._interval

    def _note(self, ranks: RankAssignment, done: Progress) -> None:
        if not done.steps:
            return
        key, first = self._first
        if key != ranks.key:
            first = done.at
            self._first = ranks.key, first
        seconds, age = max(0, done.at - first), max(0, self._clock() - done.at)
        self._part = AutoscaleNodeReport(
            key=ranks.key,
            steps=min(done.steps, MAX_TOTAL),
            # All ranks make the same steps, each with its share of the batch.
            samples=min(done.samples * ranks.world_size, MAX_TOTAL) or None,
            seconds=round(seconds / 1e9, 3),
            age=round(age / 1e9, 3),
            left=None if done.left is None else min(done.left, MAX_TOTAL),
            known=self._part.known,
        )
        self._wake()
