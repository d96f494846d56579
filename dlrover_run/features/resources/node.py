"""What workers use as a feature of a node: sampled with the agent's tick, reported, and in the event log."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from dlrover_run.agent.framework import AgentServices, FrameworkAdapter
from dlrover_run.agent.node_feature import NodeFeature
from dlrover_run.agent.result import JobResult
from dlrover_run.coordination.records.activity import NodeActivity
from dlrover_run.events.records import Event, WorkerExited, WorkerKept, WorkerStarted
from dlrover_run.observe.tick import EARLY, SAMPLE_INTERVAL, Activities

if TYPE_CHECKING:
    from dlrover_run.features.resources.monitor import ResourceMonitor


class Resources(NodeFeature):
    """The resources that the tasks of this node use, of any framework."""

    def __init__(self, services: AgentServices, tasks: FrameworkAdapter[Any]) -> None:
        super().__init__(services, tasks)
        self._monitor: ResourceMonitor | None = None
        # What was noted before the monitor was imported, for which no start of a worker waits.
        self._early: list[Event] = []
        services.events.listen(self._note)
        name = "what workers use of processors, memory and devices"
        services.tick.add(name, self._take, first=SAMPLE_INTERVAL, early=EARLY * SAMPLE_INTERVAL)

    async def look(self) -> None:
        # The tick reports an error.
        with contextlib.suppress(Exception):
            await self._begun().sample()

    def add_to_activity(self, activity: NodeActivity) -> NodeActivity:
        use = None if self._monitor is None else self._monitor.use
        return activity if use is None else replace(activity, use=use)

    async def close(self, result: JobResult) -> None:
        if self._monitor is not None:
            self._monitor.close()

    def _note(self, event: Event) -> None:
        if self._monitor is not None or isinstance(event, WorkerExited):
            self._begun().note(event)
        elif isinstance(event, WorkerStarted | WorkerKept):
            self._early.append(event)

    async def _take(self, sample: Activities) -> float:
        await self._begun().take()
        return SAMPLE_INTERVAL

    def _begun(self) -> ResourceMonitor:
        if self._monitor is None:
            from dlrover_run.features.resources.monitor import ResourceMonitor

            self._monitor = ResourceMonitor(self._services.events.emit)
            for event in self._early:
                self._monitor.note(event)
            self._early.clear()
        return self._monitor


NODE = Resources
