"""One round on this node, from the start of its workers to the evidence of how they ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from dlrover_run import failures
from dlrover_run.agent.evidence import worker_end
from dlrover_run.agent.group import WorkerGroup
from dlrover_run.agent.outfit import Outfit, release
from dlrover_run.agent.ports import HeldPort
from dlrover_run.agent.process import WorkerProcess
from dlrover_run.agent.starter import Starter
from dlrover_run.failures.outcome import WorkerEnd
from dlrover_run.output.relay_client import Relay


class Round:
    """The workers of one round with all that was made for them.

    `port` is the store's, held for the worker that hosts it, or None where that is another node's business. `on_end` is
    called with each worker that ends.
    """

    def __init__(self, outfit: Outfit, port: HeldPort | None, on_end: Callable[[WorkerProcess], None]) -> None:
        self.key = outfit.seat.key
        self.group = WorkerGroup(outfit.starts, self._note_end)
        self._outfit = outfit
        self._port = port
        self._on_end = on_end
        self._memory = failures.MemoryWatch()
        self._started = time.monotonic()
        self._starting: asyncio.Future[None] | None = None
        self.lasted = 0.0
        self.ends: tuple[WorkerEnd, ...] = ()

    async def start(self, starter: Starter) -> None:
        """Start the workers; `cancel` ends this early. Raises what `starter` raises, when some may run already."""
        self._starting = asyncio.ensure_future(self._start(starter))
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await self._starting
        finally:
            self._starting = None
            release(self._outfit)

    async def _start(self, starter: Starter) -> None:
        await starter.prepare(self._outfit.starts)
        await self.group.start(starter.start)

    def cancel(self) -> None:
        """Start no further worker: a template may import for minutes, and a signal does not wait for that."""
        if self._starting is not None:
            self._starting.cancel()

    def failure(self) -> WorkerEnd | None:
        """The first worker that failed of itself, with the evidence that is there at once."""
        first = self.group.first_failed
        return None if first is None else self._describe(first, None)

    async def gather_evidence(self, relay: Relay, patience: float | None) -> None:
        """Set `ends`, when all workers have ended, and forget the round's streams.

        A console that is stuck gets `patience` seconds; None is as long as nobody hurries the relay. Repeated, it does
        nothing.
        """
        if self.ends:
            return
        keys = [str(worker.local_rank) for worker in self.group.ended]
        tails = await relay.end_round(keys, timeout=patience)
        self.ends = tuple(self._describe(worker, tails.get(str(worker.local_rank))) for worker in self.group.ended)

    def results(self) -> dict[int, bytes]:
        """What a function returned, pickled, by the global rank of each worker that succeeded."""
        results = self._outfit.results
        if results is None:
            return {}
        return {end.rank: results.read(end.local_rank) for end in self.ends if end.code == 0}

    def close(self) -> None:
        """Let go of the port and of the results."""
        if self._port is not None:
            self._port.release()
        if self._outfit.results is not None:
            self._outfit.results.close()

    def _describe(self, worker: WorkerProcess, tail: str | None) -> WorkerEnd:
        return worker_end(worker, self._outfit.streams.ranks[worker.local_rank], tail, self._memory)

    def _note_end(self, worker: WorkerProcess) -> None:
        self.lasted = time.monotonic() - self._started
        self._on_end(worker)
