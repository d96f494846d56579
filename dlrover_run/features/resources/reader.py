"""Reads what the workers use in a thread of its own. The kernel walks the pages of a process for as long as it has
pages, and waits for a process that holds its memory map: that delays this thread, and no heartbeat of the agent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from dlrover_run.coordination.records.resource_use import TaskUse
from dlrover_run.processes import signals

if TYPE_CHECKING:
    from dlrover_run.features.resources.devices import DeviceReader
    from dlrover_run.features.resources.processes import WorkerMeter


class Target(NamedTuple):
    """A worker to read. `local_rank` is None for a task whose place on the node says nothing of its device."""

    pid: int
    name: str
    local_rank: int | None


Readings = Mapping[int, TaskUse]
"""By pid; a worker that has ended is left out."""

Reading = Future[Readings | Exception]
"""A reading that is under way, with its exception as its result if it fails."""


class UseReader:
    """Reads workers each time that it is asked to, and their devices from what `devices` has read last. `limit` are the
    bytes that each may use. Its thread ends with `close`; a daemon, so that an agent exits while a read hangs."""

    def __init__(self, limit: int, devices: DeviceReader | None, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._devices = devices
        self._clock = clock
        self._meters: dict[int, WorkerMeter] = {}
        self._targets: Sequence[Target] = ()
        self._reading: Reading | None = None
        self._asked = threading.Event()
        self._closed = False
        with signals.blocked_in_new_threads():
            self._thread = threading.Thread(target=self._run, name="resources", daemon=True)
            self._thread.start()

    def ask(self, targets: Sequence[Target]) -> Reading:
        """Begin to read, and return at once. Not to be called while a reading is under way."""
        self._targets, self._reading = targets, Future()
        self._asked.set()
        return self._reading

    def close(self) -> None:
        """End the thread after the worker that it reads. Idempotent."""
        self._closed = True
        self._asked.set()
        if self._devices is not None:
            self._devices.close()

    def _run(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            if self._reading is not None and not self._reading.done():
                self._reading.set_result(self._read_all(self._targets))
            if self._closed:
                return

    def _read_all(self, targets: Sequence[Target]) -> Readings | Exception:
        try:
            # psutil takes longer to import than a launch may wait.
            from dlrover_run.features.resources.processes import WorkerMeter

            kept = self._meters
            self._meters = {one.pid: kept.get(one.pid) or WorkerMeter(one.pid, self._limit) for one in targets}
            readings = {target.pid: use for target in targets if (use := self._read(target)) is not None}
            if self._devices is not None:
                self._devices.ask()
        except Exception as error:
            return error
        return readings

    def _read(self, target: Target) -> TaskUse | None:
        if self._closed or (use := self._meters[target.pid].read(self._clock())) is None:
            return None
        return TaskUse(
            name=target.name,
            memory=use.memory,
            processors=None if use.processors is None else round(use.processors, 3),
            processes=len(use.pids),
            devices=() if self._devices is None else tuple(self._devices.used_by(use.pids, target.local_rank)),
        )
