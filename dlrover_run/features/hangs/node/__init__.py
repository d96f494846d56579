"""Hangs and stragglers as a feature of a node: the watch over the workers of each round."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from dlrover_run.agent.framework import AgentServices, FrameworkAdapter
from dlrover_run.agent.result import JobResult
from dlrover_run.coordination.records.activity import NodeActivity
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import RoundKey
from dlrover_run.features.hangs.node.ras_address import RasAddress
from dlrover_run.features.hangs.settings import HangSettings
from dlrover_run.workers.feature import WorkersFeature
from dlrover_run.workers.round import WorkerRound
from dlrover_run.workers.specs import Worker

if TYPE_CHECKING:
    from dlrover_run.features.hangs.collectives.recorder_files import RecorderFiles
    from dlrover_run.features.hangs.node.round_watch import RoundWatch
    from dlrover_run.features.hangs.node.watch_health import WatchHealth
    from dlrover_run.features.hangs.search.outside import LearnedPauses


class Hangs(WorkersFeature):
    """Watches the workers of each round."""

    def __init__(self, services: AgentServices, tasks: FrameworkAdapter[Any]) -> None:
        super().__init__(services, tasks)
        self._settings = services.job.settings_of("hangs", HangSettings)
        self._watch: RoundWatch | None = None
        self._health: WatchHealth | None = None
        self._pauses: LearnedPauses | None = None
        self._ras = RasAddress(os.environ)
        self._recorder: RecorderFiles | None = None

    def follow(self, assignment: Assignment, shutting_down: bool) -> None:
        if self._watch is not None:
            self._watch.follow(assignment)

    def add_to_report(self, report: NodeReport) -> NodeReport:
        return report if self._watch is None else self._watch.add_to_report(report)

    def add_to_activity(self, activity: NodeActivity) -> NodeActivity:
        problem = "" if self._health is None else self._health.problem
        awaited = "" if self._watch is None else self._watch.awaited
        return replace(activity, watch_problem=problem, awaited=awaited) if problem or awaited else activity

    def environment(self, key: RoundKey, local_rank: int) -> Mapping[str, str]:
        return {**self._ras.variables, **self._recorder_variables()}

    def _recorder_variables(self) -> Mapping[str, str]:
        """Those of torch's flight recorder, where the user wants evidence and has a directory for it: a dump prints
        lines on the console, and those that torch makes by itself come into the same directory."""
        run_dir = self._services.run_dir
        if self._settings.action == "report" or not run_dir.keep or run_dir.path is None:
            return {}
        if self._recorder is None:
            from dlrover_run.features.hangs.collectives.recorder_files import RecorderFiles

            self._recorder = RecorderFiles(os.environ, run_dir.path)
        return self._recorder.variables

    def round_runs(self, workers: WorkerRound) -> None:
        # Its imports take milliseconds, for which the start of the workers has not waited.
        from dlrover_run.features.hangs.node.round_watch import watch_round
        from dlrover_run.features.hangs.node.watch_health import WatchHealth
        from dlrover_run.features.hangs.search.outside import LearnedPauses

        services = self._services
        if self._health is None or self._pauses is None:
            action = self._settings.action
            self._health = WatchHealth(action, services.console, services.events, services.wake)
            self._pauses = LearnedPauses()
        self._watch = watch_round(
            workers, self._settings, services, self._health, self._pauses, self._ras.address, self._recorder
        )

    def round_ends(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def worker_ended(self, worker: Worker) -> None:
        if self._watch is not None:
            self._watch.note_end(worker)

    async def close(self, result: JobResult) -> None:
        self.round_ends()
        self._ras.close()


NODE = Hangs
