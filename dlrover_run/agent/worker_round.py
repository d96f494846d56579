"""One round on this node, from the start of its workers to the evidence of how they ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from dlrover_run import failures
from dlrover_run.agent.exit_info import collect_exit_info
from dlrover_run.agent.starter import Starter
from dlrover_run.agent.worker_specs import Worker, WorkerSpecs, close_streams
from dlrover_run.coordination.records import RoundKey
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.output.relay_client import RelayClient
from dlrover_run.supervisor.group import ProcessGroup
from dlrover_run.supervisor.ports import HeldPort


class WorkerRound:
    """The workers of one round with all that was made for them.

    `port` is the store's, held for the worker that hosts it, or None where that is another node's business. `on_end` is
    called with each worker that ends, `on_news` when there is more to say of a failure.
    """

    def __init__(
        self,
        specs: WorkerSpecs,
        port: HeldPort | None,
        relay: RelayClient,
        on_end: Callable[[Worker], None],
        on_news: Callable[[], None],
    ) -> None:
        self.seat = specs.seat
        self.group = ProcessGroup(specs.workers, self._note_end)
        self._specs = specs
        self._port = port
        self._relay = relay
        self._on_end = on_end
        self._on_news = on_news
        self._memory = failures.OomMonitor()
        self._started = time.monotonic()
        self._starting: asyncio.Future[None] | None = None
        self._asking: asyncio.Future[None] | None = None
        self._to_ask: list[Worker] = []
        self._failed: list[WorkerExit] = []
        self._live: list[failures.LiveWorker] = []
        self.lasted = 0.0
        self.ends: tuple[WorkerExit, ...] = ()
        self.has_trained = False

    @property
    def key(self) -> RoundKey:
        """Which round it is."""
        return self.seat.key

    async def start(self, starter: Starter) -> None:
        """Start the workers; `cancel` ends this early. Raises what `starter` raises, when some may run already."""
        self._starting = asyncio.ensure_future(self._start(starter))
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await self._starting
        finally:
            self._starting = None
            close_streams(self._specs.workers)

    async def _start(self, starter: Starter) -> None:
        await starter.prepare([worker.environment for worker in self._specs.workers])
        await self.group.start(starter.start)

    def cancel(self) -> None:
        """Start no further worker: a template may import for minutes, and a signal does not wait for that."""
        if self._starting is not None:
            self._starting.cancel()

    @property
    def failure(self) -> WorkerExit | None:
        """The worker that failed first of itself, once it is known how; None while none did.

        It is another one when a worker failed that the first one lost as a peer.
        """
        if self._asking is not None and self._asking.done():
            self._asking.result()  # Raises what went wrong, for nobody else asks.
        return failures.root_cause(self._failed)

    async def collect_exit_info(self, patience: float | None) -> None:
        """Set `ends`, when all workers have ended, and forget the round's streams.

        A console that is stuck gets `patience` seconds; None is as long as nobody hurries the relay. Repeated, it does
        nothing.
        """
        if self.ends:
            return
        tails = await self._relay.end_round([_key(worker) for worker in self.group.ended], timeout=patience)
        self.ends = tuple(self._describe(worker, tails.get(_key(worker))) for worker in self.group.ended)

    def results(self) -> dict[int, bytes]:
        """What a function returned, pickled, by the global rank of each worker that succeeded."""
        results = self._specs.results
        if results is None:
            return {}
        return {end.rank: results.read(end.local_rank) for end in self.ends if end.code == 0}

    def close(self) -> None:
        """Let go of the port, of the results and of what was being asked."""
        if self._asking is not None:
            self._asking.cancel()
        if self._port is not None:
            self._port.release()
        if self._specs.results is not None:
            self._specs.results.close()
        self._specs.startup_probe.close()

    def _describe(self, worker: Worker, tail: str | None) -> WorkerExit:
        end = collect_exit_info(worker, self._specs.streams.ranks[worker.spec.local_rank], tail, self._memory)
        failed = {one.spec.rank for one in self.group.ended if one.code != 0 and one.stopped_with is None}
        live = [one for one in self._live if one.rank not in failed]
        return replace(end, waited_for=failures.find_absent_workers(end, live, all_here=self.seat.nodes == 1))

    def _note_end(self, worker: Worker) -> None:
        self.lasted = time.monotonic() - self._started
        if worker.code != 0 and worker.stopped_with is None:
            if self._asking is None:
                # Before the others end too: the kernel forgets their connections.
                self.has_trained = self._specs.startup_probe.has_trained()
                looks = (failures.inspect_worker(one.spec.rank, one.pid) for one in self.group.running)
                self._live = [one for one in looks if one is not None]
            self._to_ask.append(worker)
            if self._asking is None or self._asking.done():
                self._asking = asyncio.ensure_future(self._ask())
        self._on_end(worker)

    async def _ask(self) -> None:
        """Find out how workers failed, each once: their last words are with the relay.

        Without these a worker that has only lost a peer looks like the culprit, and the whole job would be told so.
        """
        try:
            while self._to_ask and all(failures.lost_peer(end) for end in self._failed):
                asked, self._to_ask = self._to_ask, []
                tails = await self._relay.tails([_key(worker) for worker in asked])
                self._failed += [self._describe(worker, tails.get(_key(worker))) for worker in asked]
        finally:
            self._on_news()


def _key(worker: Worker) -> str:
    """The worker's name at the relay."""
    return str(worker.spec.local_rank)
