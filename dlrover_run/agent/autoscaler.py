"""What an agent adds to a job that scales itself: the throughput of its workers, and the command that starts nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dlrover_run.agent.framework import AgentServices
from dlrover_run.coordination.model import Assignment, NodeReport, RoundKey
from dlrover_run.progress.page import Progress

if TYPE_CHECKING:
    from dlrover_run.agent.scale_command import ScaleCommand
    from dlrover_run.agent.throughput import ThroughputReport


class Autoscaler:
    """It begins with the first assignment of a job that scales itself; only such a job imports what it needs. `read`
    returns the progress of the workers that run in a round, and `on_end` is called with the pid of a command that has
    ended. `close` it in any case."""

    def __init__(
        self,
        services: AgentServices,
        read: Callable[[RoundKey], Mapping[str, Progress]],
        on_end: Callable[[int], None],
    ) -> None:
        self._services = services
        self._read = read
        self._on_end = on_end
        self._parts: tuple[ThroughputReport, ScaleCommand] | None = None

    @property
    def pids(self) -> set[int]:
        """The pid of the command, while it runs."""
        return set() if self._parts is None else self._parts[1].pids

    def follow(self, assignment: Assignment, ends: bool) -> None:
        """Take the latest assignment; `ends` means that this node's part in the job is over. Idempotent."""
        parts = () if assignment.policy is None else assignment.policy.each()
        if self._parts is None and any(part.policy_name == "autoscale" for part in parts):
            self._parts = self._begin()
        for part in self._parts or ():
            part.follow(assignment, ends)

    def add_to_report(self, report: NodeReport) -> NodeReport:
        """The report with the steps of the workers and the end of the command."""
        for part in self._parts or ():
            report = part.add_to_report(report)
        return report

    async def close(self) -> None:
        """Read no more, and end the command."""
        if self._parts is not None:
            throughput, command = self._parts
            throughput.close()
            await command.close()

    def _begin(self) -> tuple[ThroughputReport, ScaleCommand]:
        from dlrover_run.agent.scale_command import ScaleCommand
        from dlrover_run.agent.throughput import ThroughputReport

        services, spec = self._services, self._services.job
        command = ScaleCommand(
            spec.scale_command,
            spec.run_id,
            os.environ,
            services.console.info,
            services.wake,
            self._on_end,
            services.events,
        )
        return ThroughputReport(self._read, services.wake), command
