"""Processes that are started and stopped together: the workers of a round, the processes of a health check."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic

from dlrover_run.supervisor.process import ManagedProcess, Spec, StuckProcess


class ProcessGroup(Generic[Spec]):
    """Starts, watches and stops processes. `on_end` is called with each process when it has ended, in that order."""

    def __init__(self, specs: Sequence[Spec], on_end: Callable[[ManagedProcess[Spec]], None]) -> None:
        self._specs = specs
        self._on_end = on_end
        self._changed = asyncio.Event()
        self._processes: list[ManagedProcess[Spec]] = []
        self.ended: list[ManagedProcess[Spec]] = []

    async def start(self, start_one: Callable[[Spec], Awaitable[int]]) -> None:
        """Start every process with `start_one`, which returns the pid. Raises what that raises; the caller then stops
        those already started."""
        for spec in self._specs:
            pid = await start_one(spec)
            self._processes.append(ManagedProcess(pid, spec, self._note_end, self._note_stuck))

    @property
    def live(self) -> bool:
        """Whether a process still runs."""
        return len(self.ended) < len(self._processes)

    @property
    def succeeded(self) -> bool:
        """Whether all processes have ended with exit code 0, and none of them was stopped."""
        finished = [process for process in self.ended if process.code == 0 and process.stopped_with is None]
        return len(finished) == len(self._specs)

    @property
    def pids(self) -> set[int]:
        """The pids of the processes that still run."""
        return {process.pid for process in self.running}

    @property
    def running(self) -> list[ManagedProcess[Spec]]:
        """The processes that still run."""
        return [process for process in self._processes if process.live]

    def send(self, number: signal.Signals, delivered_at: float | None = None) -> None:
        """Send a signal that ends it to every process that runs; `delivered_at` is as in `ManagedProcess.send`."""
        for process in self._processes:
            process.send(number, delivered_at)

    def forward(self, number: signal.Signals, delivered_at: float | None = None) -> None:
        """Pass on a signal that does not end it to every process that runs."""
        for process in self._processes:
            process.forward(number, delivered_at)

    def begin_stop(self, number: signal.Signals, grace: float, delivered_at: float | None = None) -> None:
        """Send all a signal that ends them, and kill each after `grace` seconds."""
        for process in self._processes:
            process.stop(number, grace, delivered_at)

    async def stop(self, number: signal.Signals, grace: float) -> None:
        """`begin_stop`, and return when all have ended. Raises StuckProcess when SIGKILL does not end one."""
        self.begin_stop(number, grace)
        await self.wait()

    async def wait(self) -> None:
        """Return when all have ended. Raises StuckProcess when SIGKILL does not end one."""
        while self.live:
            if stuck := [process for process in self.running if process.stuck]:
                raise StuckProcess(*stuck)
            self._changed.clear()
            await self._changed.wait()

    def _note_stuck(self, process: ManagedProcess[Spec]) -> None:
        self._changed.set()

    def _note_end(self, process: ManagedProcess[Spec]) -> None:
        self.ended.append(process)
        self._changed.set()
        self._on_end(process)
