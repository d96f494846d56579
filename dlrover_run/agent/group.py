"""The workers of this node in one round, from their start to the end of the last."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence

from dlrover_run.agent.process import WorkerProcess, WorkerStart

KILL_TIMEOUT = 20.0
"""Seconds that the kernel gets to end a worker after SIGKILL; then it hangs in the kernel (a dead disk or driver) for
good."""

StartOne = Callable[[WorkerStart], Awaitable[int]]


class StuckWorkers(Exception):
    """Workers that SIGKILL did not end; starting others beside them would meet the same wedged device."""


class WorkerGroup:
    """Starts, watches and stops the workers of one round. `on_end` is called with each worker as it ends, in that
    order."""

    def __init__(self, starts: Sequence[WorkerStart], on_end: Callable[[WorkerProcess], None]) -> None:
        self._starts = starts
        self._on_end = on_end
        self._all_ended = asyncio.Event()
        self._workers: list[WorkerProcess] = []
        self.ended: list[WorkerProcess] = []

    async def start(self, start_one: StartOne) -> None:
        """Start every worker with `start_one`. Raises what that raises; those already started are then the caller's to
        stop."""
        for start in self._starts:
            pid = await start_one(start)
            self._workers.append(WorkerProcess(pid, start, self._note_end))

    @property
    def live(self) -> bool:
        """Whether a worker still runs."""
        return len(self.ended) < len(self._workers)

    @property
    def succeeded(self) -> bool:
        """Whether all workers have ended with 0, and none of them because it was told to."""
        finished = [worker for worker in self.ended if worker.code == 0 and worker.stopped_with is None]
        return len(finished) == len(self._starts)

    @property
    def pids(self) -> set[int]:
        """The pids of the workers that still run."""
        return {worker.pid for worker in self._workers if worker.live}

    @property
    def running(self) -> list[WorkerProcess]:
        """The workers that still run."""
        return [worker for worker in self._workers if worker.live]

    def send(self, number: signal.Signals, told_at: float | None = None) -> None:
        """Send a signal that shall end it to every worker that runs; `told_at` is as in `WorkerProcess.send`."""
        for worker in self._workers:
            worker.send(number, told_at)

    def forward(self, number: signal.Signals, told_at: float | None = None) -> None:
        """Pass a signal on, after which they go on, to every worker that runs."""
        for worker in self._workers:
            worker.forward(number, told_at)

    async def stop(self, number: signal.Signals, grace: float, told_at: float | None = None) -> None:
        """Ask all to end, kill each after `grace` seconds of its own, and return when all have ended.

        Raises StuckWorkers when the kernel does not end one KILL_TIMEOUT seconds after that.
        """
        for worker in self._workers:
            worker.stop(number, grace, told_at)
        try:
            await asyncio.wait_for(self._wait_for_all(), grace + KILL_TIMEOUT)
        except TimeoutError:
            stuck = ", ".join(f"rank {w.rank} (pid {w.pid})" for w in self._workers if w.live)
            raise StuckWorkers(
                f"SIGKILL did not end {stuck} in {KILL_TIMEOUT:g} s: the kernel holds it; look at its device or disk"
            ) from None

    async def _wait_for_all(self) -> None:
        while self.live:
            self._all_ended.clear()
            await self._all_ended.wait()

    def _note_end(self, worker: WorkerProcess) -> None:
        self.ended.append(worker)
        if not self.live:
            self._all_ended.set()
        self._on_end(worker)
