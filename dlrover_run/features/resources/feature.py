"""What workers use as a feature of a node: sampled with the agent's tick, reported, and in the event log."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from dlrover_run.agent.framework import AgentServices, FrameworkAdapter
from dlrover_run.agent.node_feature import NodeFeature
from dlrover_run.agent.result import JobResult
from dlrover_run.coordination.activity import NodeActivity
from dlrover_run.features.observe.tick import EARLY, SAMPLE_INTERVAL, Activities
from dlrover_run.features.resources.monitor import ResourceMonitor


class Resources(NodeFeature):
    """The resources that the tasks of this node use, of any framework."""

    def __init__(self, services: AgentServices, tasks: FrameworkAdapter[Any]) -> None:
        super().__init__(services, tasks)
        self._monitor = ResourceMonitor(services.events.emit)
        services.events.listen(self._monitor.note)
        name = "what workers use of processors, memory and devices"
        services.tick.add(name, self._take, first=SAMPLE_INTERVAL, early=EARLY * SAMPLE_INTERVAL)

    def look(self) -> None:
        self._monitor.sample()

    def add_to_activity(self, activity: NodeActivity) -> NodeActivity:
        use = self._monitor.use
        return activity if use is None else replace(activity, use=use)

    async def close(self, result: JobResult) -> None:
        self._monitor.close()

    def _take(self, sample: Activities) -> float:
        self._monitor.take()
        return SAMPLE_INTERVAL


NODE = Resources
