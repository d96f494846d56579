"""The seam between the agent and a feature, and the list of the features of a job, which the agent's loop calls."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from dlrover_run.agent.result import NodeRefused
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.features import FEATURES

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlrover_run.agent.framework import AgentServices, FrameworkAdapter
    from dlrover_run.agent.result import JobResult
    from dlrover_run.coordination.records.activity import NodeActivity
    from dlrover_run.coordination.records.report import NodeReport


class NodeFeature:
    """What a node does for one feature of its job. `tasks` are those of this node.

    The agent calls it in the thread of its loop. No method but `look` and `close` waits, and in a `WorkersFeature` what
    comes before a round: what takes time goes on in the background and calls `services.wake` when there is news. Here
    each method does nothing.
    """

    def __init__(self, services: AgentServices, tasks: FrameworkAdapter[Any]) -> None:
        self._services = services
        self._tasks = tasks

    @property
    def pids(self) -> set[int]:
        """Its child processes, which are no orphans."""
        return set()

    def open(self) -> None:
        """Begin. It is called once, before the first task starts. Raises OSError."""

    def follow(self, assignment: Assignment, shutting_down: bool) -> None:
        """Take the latest assignment, in each turn of the loop, before the tasks take it; the same one may come again.
        `shutting_down` means that the job is over for this node, or that it leaves. Raises what ends the node."""

    def add_to_report(self, report: NodeReport) -> NodeReport:
        """The report of this node with what the feature has to report, in each turn of the loop. Raises what ends the
        node, in place of the report."""
        return report

    async def look(self) -> None:
        """Read anew what `add_to_activity` adds: an operator asks this node, and waits. Raises nothing."""

    def add_to_activity(self, activity: NodeActivity) -> NodeActivity:
        """What this node does, for people, with what the feature knows of it; about once a second."""
        return activity

    def stop_waiting(self) -> None:
        """Hurry: this node has to stop. It is called at a signal, perhaps while `close` waits."""

    async def close(self, result: JobResult) -> None:
        """End all that it has begun, its processes too. No task runs, and `result` is that of the job for this node."""


F = TypeVar("F")


class NodeFeatures:
    """The features that the job has, as far as it is known, in the order of `FEATURES`."""

    def __init__(self) -> None:
        self._begun: dict[str, NodeFeature] = {}
        self._is_open = False

    def begin(self, services: AgentServices, tasks: FrameworkAdapter[Any], assignment: Assignment) -> None:
        """Begin what the job has by this assignment or by its own settings. Idempotent. Raises OSError."""
        engine = services.job.rules.engine
        for row in FEATURES:
            if row.name in self._begun or row.node is None or (engine and not row.any_engine):
                continue
            if row.node(row.name, services.job, assignment):
                begun: NodeFeature = import_module(row.module("node")).NODE(services, tasks)
                self._begun[row.name] = begun
                begun.open()
                # One that begins by a later assignment takes its place among those before it.
                self._begun = {each.name: self._begun[each.name] for each in FEATURES if each.name in self._begun}

    def of(self, kind: type[F]) -> list[F]:
        """Those of a class."""
        return [feature for feature in self._begun.values() if isinstance(feature, kind)]

    @property
    def pids(self) -> set[int]:
        """Their child processes."""
        return set().union(*(feature.pids for feature in self._begun.values()))

    def follow(self, assignment: Assignment, shutting_down: bool) -> None:
        for feature in self._begun.values():
            feature.follow(assignment, shutting_down)

    def add_to_report(self, report: NodeReport) -> NodeReport:
        """Raises NodeRefused if one of them says that the node must leave; the others have seen the report too."""
        refused: NodeRefused | None = None
        for feature in self._begun.values():
            try:
                report = feature.add_to_report(report)
            except NodeRefused as error:
                refused = refused or error
        if refused is not None:
            raise refused
        return report

    async def look(self) -> None:
        for feature in list(self._begun.values()):
            await feature.look()

    def add_to_activity(self, activity: NodeActivity) -> NodeActivity:
        for feature in self._begun.values():
            activity = feature.add_to_activity(activity)
        return activity

    def stop_waiting(self) -> None:
        for feature in self._begun.values():
            feature.stop_waiting()

    async def close(self, result: JobResult, on_error: Callable[[str, Exception], None]) -> None:
        """End them all, one after the other. `on_error` is called with the name of each that cannot be ended: the
        result of the job stays, and the others are ended nevertheless."""
        for name, feature in self._begun.items():
            try:
                await feature.close(result)
            except Exception as error:
                on_error(name, error)
