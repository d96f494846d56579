"""Samples what the workers of this node use, keeps the last sample, and writes it to the event log.

It learns which workers run from the events of the agent, so it serves every framework, and needs nothing of the rounds.
Threads read the workers and the devices (`reader`, `devices`). psutil and NVML are imported with the first sample, for
which no launch waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlrover_run.background import TimeLimit
from dlrover_run.coordination.records.resource_use import MAX_TASKS, NodeUse, TaskUse
from dlrover_run.devices import holders
from dlrover_run.devices.capacity import usable_memory
from dlrover_run.events.records import (
    Event,
    WorkerEvent,
    WorkerExited,
    WorkerKept,
    WorkerResources,
    WorkerStarted,
)
from dlrover_run.features.resources.reader import Reading, Target, UseReader

if TYPE_CHECKING:
    from dlrover_run.features.resources.devices import DeviceReader

SAMPLE_INTERVAL = 5.0
"""Seconds between two samples: as often as a node reports to its master. One takes some 2 ms for a worker with 8 data
loaders, and some 24 ms if each of these processes has 100 threads."""

MIN_INTERVAL = 0.5
"""Seconds between two samples that programs of operators ask for: in less the kernel counts too few ticks of a
processor."""

READ_TIMEOUT = 2.0
"""Seconds that the agent and programs of operators wait for a sample. A longer one goes on, and counts when it is
done."""

LOG_INTERVAL = 60.0
"""Seconds between two events with the figures of a worker."""


@dataclass
class _Worker:
    """One worker that runs, by the event of its start. `use` is what it used in the last sample."""

    start: WorkerEvent
    pid: int
    name: str
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
        self._reader: UseReader | None = None
        self._reading: Reading | None = None
        # Those that it reads: a worker that has started since may have the pid of one that has ended.
        self._read_workers: dict[int, _Worker] = {}
        self._error: Exception | None = None
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
        """End the threads: a driver is not held open between two rounds. Idempotent."""
        if self._reader is not None:
            self._reader.close()
        self._reader = self._reading = self._sampled_at = None

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

    async def take(self) -> None:
        """Sample if it is time for it, and write the figures of each minute to the log. Raises what the last sample has
        failed with."""
        if self._sampled_at is None or self._clock() - self._sampled_at >= SAMPLE_INTERVAL:
            await self.sample()
        self._collect()
        self._log_figures()
        if (error := self._error) is not None:
            self._error = None
            raise error

    async def sample(self) -> None:
        """Read what the workers use now; devices are those that were read last. It waits READ_TIMEOUT at most."""
        self._collect()
        now = self._clock()
        if not self._workers:
            return
        if self._reading is None and (self._sampled_at is None or now - self._sampled_at >= MIN_INTERVAL):
            self._read_workers = dict(self._workers)
            targets = [_target(worker) for worker in self._workers.values()]
            self._reading = self._begin().ask(targets)
            self._sampled_at = now
        if self._reading is not None and self._sampled_at is not None:
            await _until_done(self._reading, self._sampled_at + READ_TIMEOUT - now)
            self._collect()

    def _collect(self) -> None:
        """Take the figures of a reading that is done."""
        if self._reading is None or not self._reading.done():
            return
        readings, self._reading = self._reading.result(), None
        if isinstance(readings, Exception):
            self._error = readings
            return
        for pid, use in readings.items():
            if (worker := self._workers.get(pid)) is not None and worker is self._read_workers.get(pid):
                worker.use = replace(use, name=worker.name)

    def _log_figures(self) -> None:
        now = self._clock()
        for worker in self._workers.values():
            if worker.use is not None and now - worker.logged_at >= LOG_INTERVAL:
                worker.logged_at = now
                self._emit(self._figures(worker))

    def _note_start(self, event: WorkerStarted | WorkerKept) -> None:
        known = self._workers.get(event.pid)
        name = f"{event.role}-{event.rank}" if event.role else event.name
        # One that is kept runs since an earlier round, where it may have had another rank.
        worker = _Worker(event, event.pid, name) if known is None else known
        worker.start, worker.name = event, name
        if worker.use is not None:
            worker.use = replace(worker.use, name=name)
        self._workers[event.pid] = worker

    def _begin(self) -> UseReader:
        if self._reader is None:
            self._limit = usable_memory()
            self._reader = UseReader(self._limit, self._open_devices(), self._clock)
        return self._reader

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
            devices=use.devices,
        )


def _target(worker: _Worker) -> Target:
    # A task with a role has a place on the node that says nothing of its device.
    return Target(worker.pid, worker.name, None if worker.start.role else worker.start.local_rank)


async def _until_done(reading: Reading, timeout: float) -> None:
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def wake(reading: Reading) -> None:
        with contextlib.suppress(RuntimeError):  # The loop may be closed by now.
            loop.call_soon_threadsafe(done.set)

    if timeout > 0:
        reading.add_done_callback(wake)
        with contextlib.suppress(TimeoutError):
            async with TimeLimit(timeout):
                await done.wait()


def _open_devices() -> DeviceReader | None:
    if not holders.is_present():
        return None
    from dlrover_run.features.resources.devices import DeviceReader

    return DeviceReader()
