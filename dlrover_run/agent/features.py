"""What this node does for the policies of its job, beside running workers. An agent imports only what its job has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dlrover_run.agent.framework import AgentServices
from dlrover_run.coordination.model import Assignment, NodeReport, RoundKey
from dlrover_run.coordination.parts import applies, has_part
from dlrover_run.features.observe.page import Progress
from dlrover_run.features.observe.progress_reporter import ProgressReporter
from dlrover_run.workers.round import WorkerRound
from dlrover_run.workers.specs import Worker
from dlrover_run.workers.starter import Starter

if TYPE_CHECKING:
    from dlrover_run.features.autoscale.autoscaler import Autoscaler
    from dlrover_run.features.hangs.node.stall_response import RoundStalls
    from dlrover_run.features.hangs.node.watch_health import WatchHealth
    from dlrover_run.features.hangs.search.outside import LearnedPauses
    from dlrover_run.features.node_check.node.node_checks import NodeChecks
    from dlrover_run.features.survivors.survivors import Survivors


class Features:
    """Each is None in a job without it. The stalls are those of one round; all else lasts until `close`.

    `reporter` prints the health check too. `read` returns the progress of the workers that run in a round, and
    `on_formed` is called with the local rank of a worker that has joined the group of its round.
    """

    def __init__(
        self,
        services: AgentServices,
        starter: Starter,
        reporter: ProgressReporter,
        read: Callable[[RoundKey], Mapping[str, Progress]],
        on_formed: Callable[[int], None],
    ) -> None:
        self.checks: NodeChecks | None = None
        self.survivors: Survivors | None = None
        self.autoscaler: Autoscaler | None = None
        self.stalls: RoundStalls | None = None
        self.watch_health: WatchHealth | None = None
        self._pauses: LearnedPauses | None = None
        self._services = services
        self._starter = starter
        self._reporter = reporter
        self._read = read
        self._on_formed = on_formed
        if applies(services.job.rules.parts, "health"):
            self._begin_checks()

    @property
    def _lasting(self) -> list[NodeChecks | Survivors | Autoscaler]:
        return [one for one in (self.checks, self.survivors, self.autoscaler) if one is not None]

    @property
    def pids(self) -> set[int]:
        """Their child processes."""
        return set().union(*(one.pids for one in self._lasting))

    def open(self) -> None:
        """Begin what workers need at their start. Raises OSError."""
        services = self._services
        if applies(services.job.rules.parts, "survivors"):
            from dlrover_run.features.survivors.survivors import Survivors

            self.survivors = Survivors(self._on_formed, services.wake, services.console.info)

    def begin(self, assignment: Assignment) -> None:
        """Begin what the job has by this assignment, whether or not the command line of this node asks for it."""
        waiting = () if assignment.waiting is None else assignment.waiting.parts
        if self.checks is None and (has_part(assignment.parts, "health") or has_part(waiting, "health")):
            self._begin_checks()
        if self.autoscaler is None and has_part(assignment.parts, "autoscale"):
            from dlrover_run.features.autoscale.autoscaler import Autoscaler

            self.autoscaler = Autoscaler(self._services, self._read, self._services.orphans.kill_session)

    def watch(self, workers: WorkerRound) -> None:
        """Watch the workers of a round for stalls, if the job does."""
        if self._services.job.stall_action != "off":
            # Its imports take milliseconds, for which the start of the workers has not waited.
            from dlrover_run.features.hangs.node.stall_response import watch_stalls
            from dlrover_run.features.hangs.node.watch_health import WatchHealth
            from dlrover_run.features.hangs.search.outside import LearnedPauses

            services = self._services
            if self.watch_health is None:
                action = services.job.stall_action
                self.watch_health = WatchHealth(action, services.console, services.events, services.wake)
                self._pauses = LearnedPauses()
            assert self._pauses is not None
            self.stalls = watch_stalls(workers, services.job, services, self.watch_health, self._pauses)

    def end_watch(self) -> None:
        """Watch no more, before the files of the round are closed. Idempotent."""
        if self.stalls is not None:
            self.stalls.close()
            self.stalls = None

    def note_end(self, worker: Worker) -> None:
        """A worker has ended."""
        if self.survivors is not None:
            self.survivors.note_end(worker)
        if self.stalls is not None:
            self.stalls.note_end(worker)

    def add_to_report(self, report: NodeReport) -> NodeReport:
        """The report of this node with what they have found."""
        if self.stalls is not None:
            report = self.stalls.add_to_report(report)
        for one in self._lasting:
            report = one.add_to_report(report)
        return report

    async def close(self) -> None:
        """End them all permanently, with their processes."""
        for one in self._lasting:
            await one.close()

    def _begin_checks(self) -> None:
        from dlrover_run.features.node_check.node.node_checks import NodeChecks

        self.checks = NodeChecks(self._services, self._starter)
        self._reporter.health = self.checks.reporter
