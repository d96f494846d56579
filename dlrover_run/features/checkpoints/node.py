"""Checkpoints in memory as a feature of a node: the workers find the memory, and it is drained once they have ended."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from dlrover_run.agent.framework import AgentServices, FrameworkAdapter
from dlrover_run.agent.result import JobResult
from dlrover_run.coordination.records.activity import NodeActivity
from dlrover_run.coordination.records.round import RoundKey
from dlrover_run.features.checkpoints.agent_memory import DRAIN_TIMEOUT, CheckpointMemory
from dlrover_run.features.checkpoints.settings import CheckpointSettings
from dlrover_run.workers.feature import WorkersFeature


class Checkpoints(WorkersFeature):
    """The memory of a node for the checkpoints of its workers."""

    def __init__(self, services: AgentServices, tasks: FrameworkAdapter[Any]) -> None:
        super().__init__(services, tasks)
        job = services.job
        secret = job.rendezvous.secret
        self._memory = CheckpointMemory(
            job.settings_of("checkpoints", CheckpointSettings).limit,
            services.console.info,
            secret,
            single_node=job.single_node,
        )

    @property
    def pids(self) -> set[int]:
        return self._memory.pids

    def open(self) -> None:
        self._memory.open()

    def environment(self, key: RoundKey, local_rank: int) -> Mapping[str, str]:
        return self._memory.environment()

    def add_to_activity(self, activity: NodeActivity) -> NodeActivity:
        return activity if self._memory.use is None else replace(activity, memory=self._memory.use)

    def stop_waiting(self) -> None:
        self._memory.hurry(self._drain_timeout)

    async def close(self, result: JobResult) -> None:
        await self._memory.drain(self._drain_timeout)

    @property
    def _drain_timeout(self) -> float:
        """The seconds after the end of the workers in which their checkpoints are written."""
        number, seconds, _ = self._services.shutdown.stop_with(DRAIN_TIMEOUT)
        return 0.0 if number is signal.SIGKILL else seconds


NODE = Checkpoints
