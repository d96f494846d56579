"""The memory of devices as a feature of a node: before a round, the processes are ended that still hold a device."""

from __future__ import annotations

import os
import time
from typing import Any

from dlrover_run.agent.framework import AgentServices, FrameworkAdapter
from dlrover_run.devices import holders
from dlrover_run.events.records import DevicesFreed
from dlrover_run.processes import tree
from dlrover_run.workers.feature import WorkersFeature
from dlrover_run.workers.specs import Worker

FREE_TIMEOUT = 30.0
"""Seconds for the end of the processes that hold a device, after SIGKILL: the driver frees tens of gigabytes for them,
on a busy machine. One that takes longer is stuck in the driver, and the workers start nevertheless."""


class DeviceMemory(WorkersFeature):
    """Ends what the last round has left behind, as far as it holds a device, and waits for the end: the driver frees
    the memory of a process before the kernel reports its end. It costs nothing where nothing is left."""

    def __init__(self, services: AgentServices, tasks: FrameworkAdapter[Any]) -> None:
        super().__init__(services, tasks)
        self._ended: set[int] = set()

    def worker_ended(self, worker: Worker) -> None:
        self._ended.add(worker.pid)

    async def before_cleanup(self) -> None:
        """While others of the round keep their processes, only what those that have ended left in their sessions: a
        process that a running worker has detached may be a service of its own."""
        sessions, self._ended = self._ended, set()
        keeps = self._tasks.running
        orphans = self._services.orphans

        def holds(process: tree.ProcessInfo) -> bool:
            return (not keeps or process.session in sessions) and holders.holds_device(process.pid)

        held = orphans.find(holds)
        if not held:
            return
        began = time.monotonic()
        left = await orphans.end(holds, FREE_TIMEOUT)
        self._services.events.emit(DevicesFreed(since=began, processes=len(held), left=len(left)))
        for line in await self._other_holders(left, alone=not keeps):
            self._services.console.info(f"warning: {line}")

    async def _other_holders(self, left: list[int], alone: bool) -> list[str]:
        """What still holds a device. Only now, because NVML takes milliseconds."""
        from dlrover_run.features.device_memory.users import ask_nvml, describe_left

        ours = {one.pid for one in tree.descendants()} | {os.getpid()}
        return [*describe_left(left), *await ask_nvml(os.environ, ours, alone)]


NODE = DeviceMemory
