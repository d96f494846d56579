"""The node checks of this node: its tasks are carried out, and what they find is printed, logged and kept.

Imported only by an agent whose job has a node check.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dlrover_run.agent.framework import AgentServices, FrameworkAdapter
from dlrover_run.agent.result import JobResult
from dlrover_run.console import rounds
from dlrover_run.console.console import Console, DrawTable
from dlrover_run.coordination.records.assignment import Assignment, Waiting
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import RankAssignment
from dlrover_run.events.records import CheckEnded, CheckStarted, Events
from dlrover_run.features.node_check.decision.model import (
    HealthStatus,
    LinkRow,
    NodeCheckAssignment,
    NodeCheckProgress,
    NodeHealth,
)
from dlrover_run.features.node_check.node import health_table
from dlrover_run.features.node_check.node.check_runner import NodeCheckRunner
from dlrover_run.features.node_check.node.health_file import HealthFile
from dlrover_run.features.node_check.node.machine import severe_node_problems
from dlrover_run.features.node_check.rules import CHECK_ALWAYS, NodeCheckRules
from dlrover_run.spec import JobSpec
from dlrover_run.workers.feature import WorkersFeature

_BAD = frozenset({HealthStatus.STRAGGLER, HealthStatus.FAULT})


class NodeChecks(WorkersFeature):
    """All that this node does for the node checks of its job."""

    def __init__(self, services: AgentServices, tasks: FrameworkAdapter[Any]) -> None:
        super().__init__(services, tasks)
        spec, log = services.job, services.console.info
        self._runner = NodeCheckRunner(
            spec, tasks.starter, services.orphans.paused, services.wake, partial(severe_node_problems, spec, log), log
        )
        self._events = CheckEvents(services.events)
        self._file = HealthFile(services.run_dir, log)
        self.wait_details = NodeCheckReporter(spec, services.console)

    @property
    def pids(self) -> set[int]:
        return self._runner.pids

    def follow(self, assignment: Assignment, shutting_down: bool) -> None:
        part = NodeCheckAssignment.get(assignment.parts)
        self._events.follow(part)
        if not self._services.shutdown.requested:
            self._file.follow(assignment, self._runner.devices)
        # While no worker runs or starts, the devices are free, unless another feature looks at them.
        is_free = self._services.node_state.round is None and self._tasks.idle
        if (
            not shutting_down
            and is_free
            and not any(one.needs_devices for one in self._services.features_of(WorkersFeature))
        ):
            self._runner.update(part.check_task, part.health)

    def add_to_report(self, report: NodeReport) -> NodeReport:
        return self._runner.add_to_report(report)

    async def before_round(self, ranks: RankAssignment, is_wanted: Callable[[], bool]) -> None:
        # The workers need the devices.
        await self._runner.suspend()

    async def close(self, result: JobResult) -> None:
        await self._runner.close()


NODE = NodeChecks


class CheckEvents:
    """Emits when the coordinator begins to check this node, and what the check has found."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._running = False

    def follow(self, part: NodeCheckAssignment) -> None:
        """Take the latest assignment; the same one may come again. Between two rounds of a check the node may have
        neither a task nor a result."""
        health = part.health
        if part.check_task is not None:
            if not self._running:
                self._events.emit(CheckStarted())
            self._running = True
        elif self._running and health is not None and health.status is not HealthStatus.PENDING:
            self._events.emit(CheckEnded(status=health.status.value, reason=health.reason))
            self._running = False


class NodeCheckReporter:
    """Prints the state and the result of each node check on `console`."""

    def __init__(self, spec: JobSpec, console: Console) -> None:
        self._single_node = spec.rules.max_nodes == 1
        self._rules = NodeCheckRules.get(spec.rules.parts)
        self._console = console
        self._reported_restarts = 0
        self._rows: tuple[NodeHealth, ...] = ()
        self._node_health: NodeHealth | None = None
        self._others: frozenset[NodeHealth] = frozenset()
        self._links: frozenset[tuple[frozenset[str], LinkRow]] = frozenset()

    def before(self, assignment: Assignment) -> None:
        """If a check runs between two rounds, print the failure that ended the first one before it."""
        between = assignment.ranks is None and assignment.phase is PlanPhase.GATHERING
        failure = assignment.failure if between and self._rules.check == CHECK_ALWAYS else None
        if failure is None or assignment.restart_count <= self._reported_restarts:
            return
        self._reported_restarts = assignment.restart_count
        reason = f"rank {failure.rank} {failure.exit_text}" if self._single_node else str(failure)
        before = f"a node check comes before restart {assignment.restart_count}"
        self._console.error(f"{rounds.clause(reason)}; {before}")

    def table(self, waiting: Waiting) -> DrawTable | None:
        """What draws the nodes of a check that runs; None if none does."""
        rows = NodeCheckProgress.get(waiting.parts).rows
        if not rows:
            return None
        return lambda columns, lines: health_table.render_live_table(rows, columns, lines, self._console.color)

    def news(self, waiting: Waiting) -> None:
        """On a console without a live table, print a line for each node that has just failed. Nodes that pass are
        printed at the end of the check."""
        rows = NodeCheckProgress.get(waiting.parts).rows
        if not rows:
            return
        known = {(row.node_id, row.incarnation): row.status for row in self._rows}
        self._rows = rows
        if self._console.columns is not None:
            return
        for place, row in enumerate(rows):
            if row.status in _BAD and known.get((row.node_id, row.incarnation)) is not row.status:
                self._console.info(health_table.render_node_status(rows, place))

    def after(self, assignment: Assignment) -> None:
        """Print the table on the node with rank 0, and one line on the others. A round without a check only has fewer
        nodes or another order of them, which prints nothing."""
        part = NodeCheckAssignment.get(assignment.parts)
        node_health, others = part.health, part.health_table
        page = self._console.width, self._console.color
        if (
            node_health is not None
            and node_health != self._node_health
            and node_health.status is not HealthStatus.PENDING
        ):
            self._node_health = node_health
            # The line would repeat the table, and the result of the job has the reason of a dismissal.
            if len(others) <= 1 and not node_health.dismissed:
                self._console.info(health_table.render_own_status(node_health))
        if len(others) > 1 and not self._others.issuperset(others):
            self._others = frozenset(others)
            self._console.print(health_table.render_health_table(others, *page), timed=True)
        links = tuple(link for link in part.link_table if max(link.one, link.other) < len(others))
        named = frozenset(_named(link, others) for link in links)
        if not self._links.issuperset(named):
            self._links = named
            threshold = self._rules.straggler_threshold
            self._console.print(health_table.render_link_table(others, links, threshold, *page), timed=True)


def _named(link: LinkRow, others: tuple[NodeHealth, ...]) -> tuple[frozenset[str], LinkRow]:
    """The identity of a link, which does not depend on the present ranks of its ends."""
    ends = frozenset({others[link.one].incarnation, others[link.other].incarnation})
    return ends, LinkRow(0, 0, link.gigabytes, link.problem)
