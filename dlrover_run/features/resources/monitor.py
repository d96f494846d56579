"""Samples what the workers of this node use, keeps the last sample, and writes it to the event log.

It learns which workers run from the events of the agent, so it serves every framework, and needs nothing of the rounds.
psutil and NVML are imported with the first sample, for which no launch waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import asdict, replace

from dlrover_run.coordination.resource_use import MAX_TASKS, DeviceUse, NodeUse, TaskUse
from dlrover_run.devices import holders
from dlrover_run.devices.capacity import usable_memory
from dlrover_run.features.events.records import (
    DeviceFigures,
    Event,
    WorkerEvent,
    WorkerExited,
    WorkerKept,
    WorkerResources,
    WorkerStarted,
)

if TYPE_CHECKING:
    from dlrover_run.features.resources.devices import DeviceReader
    from dlrover_run.features.resources.processes import WorkerMeter

SAMPLE_INTERVAL = 5.0
"""Seconds between two samples: as often as a node reports to its master. One takes some 0.3 ms for each worker with its
data loaders."""

MIN_INTERVAL = 0.5
"""Seconds between two samples that programs of operators ask for: in less the kernel counts too few ticks of a
processor."""

LOG_INTERVAL = 60.0
"""Seconds between two events with the figures of a worker."""


@dataclass
class _Worker:
    """One worker that runs, by the event of its start. `use` is what it used in the last sample."""

    start: WorkerEvent
    pid: int
    name: str
    meter: WorkerMeter | None = None
    use: TaskUse | None = None
    logged_at: float = float("-inf")


class ResourceMonitor:
    """The workers of one agent. `emit` writes an event to its log, and `open_devices` begins to read the devices."""

    def __init__(
        self,
        emit: Callable[[Event], None],
        open_devices: Callable[[], DeviceReader | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._emit = emit
        self._open_devices = open_devices or _open_devices
        self._clock = clock
        self._workers: dict[int, _Worker] = {}
        self._limit = 0
        self._devices: DeviceReader | None = None
        self._began = False
        self._sampled_at: float | None = None
        self._failed_in: tuple[str, int] | None = None

    def note(self, event: Event) -> None:
        """Take an event of the agent, when it is in the log."""
        if isinstance(event, WorkerStarted | WorkerKept):
            self._note_start(event)
        elif isinstance(event, WorkerExited) and (worker := self._workers.pop(event.pid, None)) is not None:
            if not self._workers:
                self.close()
            if event.failed:
                self._log_failure(worker, event)

    def close(self) -> None:
        """Read devices no more: a driver is not held open between two rounds. Idempotent."""
        if self._devices is not None:
            self._devices.close()
            self._devices = None
        self._began, self._sampled_at = False, None

    @property
    def use(self) -> NodeUse | None:
        """What the workers used in the last sample; None before the first one."""
        used = [one.use for one in self._workers.values() if one.use is not None]
        if not used:
            return None
        processors = [one.processors for one in used if one.processors is not None]
        return NodeUse(
            memory=sum(one.memory for one in used),
            memory_limit=self._limit,
            processors=round(sum(processors), 3) if processors else None,
            tasks=tuple(used[:MAX_TASKS]),
        )

    def take(self) -> None:
        """Sample if it is time for it, and write the figures of each minute to the log."""
        now = self._clock()
        if self._workers and (self._sampled_at is None or now - self._sampled_at >= SAMPLE_INTERVAL):
            self.sample()
            for worker in self._workers.values():
                if worker.use is not None and now - worker.logged_at >= LOG_INTERVAL:
                    worker.logged_at = now
                    self._emit(self._figures(worker))

    def sample(self) -> NodeUse | None:
        """Read what the workers use now; devices are those that were read last."""
        now = self._clock()
        if not self._workers or (self._sampled_at is not None and now - self._sampled_at < MIN_INTERVAL):
            return self.use
        self._sampled_at = now
        self._begin()
        from dlrover_run.features.resources.processes import WorkerMeter

        for worker in self._workers.values():
            if worker.meter is None:
                worker.meter = WorkerMeter(worker.pid, self._limit)
            if (found := worker.meter.read(now)) is not None:
                worker.use = TaskUse(
                    name=worker.name,
                    memory=found.memory,
                    processors=None if found.processors is None else round(found.processors, 3),
                    processes=len(found.pids),
                    devices=self._devices_of(worker, found.pids),
                )
        if self._devices is not None:
            self._devices.ask()
        return self.use

    def _devices_of(self, worker: _Worker, pids: Collection[int]) -> tuple[DeviceUse, ...]:
        if self._devices is None:
            return ()
        # A task with a role has a place on the node that says nothing of its device.
        local_rank = None if worker.start.role else worker.start.local_rank
        return tuple(self._devices.used_by(pids, local_rank))

    def _note_start(self, event: WorkerStarted | WorkerKept) -> None:
        known = self._workers.get(event.pid)
        name = f"{event.role}-{event.rank}" if event.role else event.name
        # One that is kept runs since an earlier round, where it may have had another rank.
        worker = _Worker(event, event.pid, name) if known is None else known
        worker.start, worker.name = event, name
        if worker.use is not None:
            worker.use = replace(worker.use, name=name)
        self._workers[event.pid] = worker

    def _begin(self) -> None:
        if not self._began:
            self._began = True
            self._limit = usable_memory()
            self._devices = self._open_devices()

    def _log_failure(self, failed: _Worker, event: WorkerExited) -> None:
        """Write what the worker that has failed used, and with the first one of a round what the others did: one of
        them may have taken the memory that it lacked."""
        self._emit(replace(self._figures(failed), peak=event.peak_memory, ended=True))
        round_ = (event.role, event.round)
        if round_ != self._failed_in:
            self._failed_in = round_
            for worker in self._workers.values():
                if worker.use is not None:
                    self._emit(self._figures(worker))

    def _figures(self, worker: _Worker) -> WorkerResources:
        use = worker.use or TaskUse(worker.name, 0)
        start = worker.start
        return WorkerResources(
            round=start.round,
            rank=start.rank,
            local_rank=start.local_rank,
            role=start.role,
            pid=worker.pid,
            memory=use.memory,
            limit=self._limit or usable_memory(),
            processors=use.processors,
            processes=use.processes,
            devices=tuple(DeviceFigures(**asdict(device)) for device in use.devices),
        )


def _open_devices() -> DeviceReader | None:
    if not holders.is_present():
        return None
    from dlrover_run.features.resources.devices import DeviceReader

    return DeviceReader()
