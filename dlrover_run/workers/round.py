"""The workers of one round on this node, from their start to the exit information of the last."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Collection

from dlrover_run.agent.shutdown import ShutdownRequest
from dlrover_run.background import beside
from dlrover_run.coordination.records.round import RoundKey
from dlrover_run.devices import holders
from dlrover_run.events.records import NO_EVENTS, Events, WorkerKept, WorkerReady, WorkerStarted
from dlrover_run.failures.guard import guarded
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.observe.page import Stop
from dlrover_run.observe.round_progress import RoundProgress
from dlrover_run.output.relay_client import RelayClient
from dlrover_run.processes import tree
from dlrover_run.processes.process import ProcessGroup
from dlrover_run.workers.cause_collector import CauseCollector, FindDeviceError, failed_by_itself, relay_key
from dlrover_run.workers.checkpoint_marks import RoundCheckpoints
from dlrover_run.workers.exits import exit_event
from dlrover_run.workers.round_store import StorePort
from dlrover_run.workers.specs import Worker, WorkerSpec, WorkerSpecs, close_streams
from dlrover_run.workers.starter import Starter

LOST_PEER_GRACE = 1.0
"""Seconds between the stop signal and SIGKILL for a worker that has lost a peer, and has a process group of NCCL or
holds a device. It waits in a collective for that peer, where Python runs no handler, so it saves nothing however long
it gets. A worker that saves its last step and has no such group answers, and has the whole grace period."""


Prepared = Callable[[WorkerSpec, asyncio.Future[float] | None], Awaitable[int | None]]
"""Returns the pid of a process that becomes a worker, if there is one: `WorkersFeature.prepared`."""


class WorkerRound:
    """The workers of one round and the resources opened for them.

    `port` is that of the round's store: served, or held for the worker that hosts it; None if another node has the
    store. `on_end` is called with each worker that ends, `on_news` when more is known about a failure, or a checkpoint
    is news for the job.
    """

    def __init__(
        self,
        specs: WorkerSpecs,
        port: StorePort | None,
        relay: RelayClient,
        on_end: Callable[[Worker], None],
        on_news: Callable[[], None],
        events: Events = NO_EVENTS,
    ) -> None:
        self.ranks = specs.ranks
        self.group = ProcessGroup(specs.workers, self._note_end)
        self._specs = specs
        self._port = port
        self._relay = relay
        self._on_end = on_end
        self._events = events
        self._started = time.monotonic()
        self.progress = RoundProgress(specs, self.group, events, self._started)
        self._causes = CauseCollector(specs, self.group, relay, events, on_news)
        self.checkpoints = RoundCheckpoints(specs.startup_probe.marks, specs.ranks.round, events, on_news)
        self._starting: asyncio.Future[None] | None = None
        self._prepared: Prepared | None = None
        self._closed = False
        self._handed_over = False
        self._kept: dict[int, int] = {}
        self._lasted = 0.0
        self.ends: tuple[WorkerExit, ...] = ()
        self.stalled: dict[int, str] = {}
        """The workers that make no progress by their ranks, with a code of the reason."""
        self.has_trained = False

    @property
    def key(self) -> RoundKey:
        """Which round it is."""
        return self.ranks.key

    @property
    def pids(self) -> set[int]:
        """The pids of its processes that run, the store's among them."""
        return self.group.pids | (set() if self._port is None else self._port.pids)

    @property
    def specs(self) -> WorkerSpecs:
        """The specs of its workers, and what was opened for them."""
        return self._specs

    def carry_on(self, before: WorkerRound, kept: Collection[int]) -> None:
        """Take over the workers with these local ranks from the round before, which is over, with what was opened for
        them; `start` starts the others."""
        self.progress.carry_on(kept)
        for worker in before.group.running:
            if (local_rank := worker.spec.local_rank) in kept:
                self.group.take_over(worker, self._specs.workers[local_rank])
                if before.key != self.key or local_rank in before._kept:
                    self._kept[local_rank] = worker.pid
        before.hand_over()

    def hand_over(self) -> None:
        """End this round for its workers that run: what was opened for them belongs to the next one."""
        self._handed_over = True
        self._lasted = self.lasted
        self.close()

    def give_port(self) -> StorePort | None:
        """The port of the store, which the caller releases from now on."""
        port, self._port = self._port, None
        return port

    def note_formed(self, local_rank: int) -> None:
        """A worker has reported that it is in the group of the round."""
        self._specs.startup_probe.note_trained()
        rank = self.ranks.first_rank + local_rank
        if (pid := self._kept.get(local_rank)) is not None:
            self._events.emit(WorkerKept(round=self.ranks.round, rank=rank, local_rank=local_rank, pid=pid))
        self._events.emit(WorkerReady(round=self.ranks.round, rank=rank, local_rank=local_rank, stage="store"))

    @property
    def lasted(self) -> float:
        """The seconds from its start to its last end of a worker; up to now, if its workers go on in the next round."""
        return self._lasted or time.monotonic() - self._started

    @property
    def has_failed(self) -> bool:
        """Whether a worker has failed by itself."""
        return self._causes.has_failed

    @property
    def failure(self) -> WorkerExit | None:
        """The worker whose failure is the root cause, as soon as the cause is known (`CauseCollector.failure`)."""
        return self._causes.failure

    def explain_by_devices(self, find: FindDeviceError) -> None:
        """Have errors of devices explain the failures of workers. A feature calls it when the round begins."""
        self._causes.find_device_error = find

    async def stopped(self) -> None:
        """Return when all workers that are being stopped have ended. Raises StuckProcess."""
        await self.group.wait_for(lambda worker: worker.stopped_with is not None)

    async def start(self, starter: Starter, at_store: bool = True, prepared: Prepared | None = None) -> None:
        """Start the workers; `cancel` ends this early. `at_store`: they meet at the store of the round, so those that
        are forked on other nodes begin when it listens. `prepared` is asked first for a process that becomes a worker.
        Raises what `starter` raises, when some may run already."""
        self._prepared = prepared
        self.checkpoints.listen()
        self._causes.watch_memory()
        try:
            async with beside(self._start(starter, at_store)) as self._starting:
                with contextlib.suppress(asyncio.CancelledError):
                    await self._starting
        finally:
            self._starting = None
            close_streams(self._specs.workers)

    async def _start(self, starter: Starter, at_store: bool) -> None:
        await starter.prepare([worker.environment for worker in self._specs.workers])
        if not (starter.forks and at_store):
            await self._start_workers(starter, None)
            return
        async with beside(self._specs.startup_probe.until_store_listens(starter.store_timeout)) as listens:
            try:
                # The first one is forked meanwhile.
                await self._start_workers(starter, listens)
            finally:
                if listens.done() and not listens.cancelled():
                    starter.store_timeout = listens.result()

    async def _start_workers(self, starter: Starter, until: asyncio.Future[float] | None) -> None:
        async def start_one(spec: WorkerSpec) -> int:
            asked = time.monotonic()
            pid = None if self._prepared is None else await self._prepared(spec, until)
            if pid is None:
                pid = await starter.start(spec, until=until)
            self._events.emit(
                WorkerStarted(
                    round=self.ranks.round,
                    rank=spec.rank,
                    local_rank=spec.local_rank,
                    pid=pid,
                    since=tree.start_of(pid, after=asked),
                )
            )
            return pid

        await self.group.start(start_one)

    def cancel(self) -> None:
        """Start no further worker: a template may import for minutes, and a shutdown does not wait for it."""
        if self._starting is not None:
            self._starting.cancel()

    async def collect_exit_info(self, drain_timeout: float | None, others_go_on: bool = False) -> None:
        """Set `ends`, when all workers have ended, and forget the round's streams; if the `others_go_on`, those of the
        workers that have ended.

        A console that is stuck gets `drain_timeout` seconds; with None there is no limit, until
        `RelayClient.stop_waiting`. Idempotent.
        """
        if self.ends and len(self.ends) == len(self.group.ended):
            return
        ended = self.group.ended[len(self.ends) :]
        keys = [relay_key(worker) for worker in ended]
        if others_go_on:
            tails = await self._relay.drain(drain_timeout, keys)
            placed = (self._specs.streams.ranks[worker.spec.local_rank] for worker in ended)
            self._relay.release(keys, [path for streams in placed for path in streams.log_paths])
        else:
            tails = await self._relay.end_round(keys, timeout=drain_timeout)
        self.ends += tuple(self._causes.describe(worker, tails.get(relay_key(worker))) for worker in ended)

    def results(self) -> dict[int, bytes]:
        """What a function returned, pickled, by the global rank of each worker that succeeded."""
        results = self._specs.results
        if results is None:
            return {}
        return {end.rank: results.read(end.local_rank) for end in self.ends if end.code == 0}

    def stop(self, shutdown: ShutdownRequest, timeout: float, restarts: int) -> None:
        """Send the workers that run the signal that stops them now; `timeout` is the grace period of
        `--shutdown-timeout`, and `restarts` how many the job has used."""
        number, grace, delivered_at = shutdown.stop_with(timeout)
        failed = self.has_failed or restarts > self.ranks.restart_count
        if failed and not shutdown.requested and grace > LOST_PEER_GRACE:
            may_hold = holders.is_present()
            for worker in self.group.running:
                if self._waits_in_vain(worker, may_hold):
                    worker.stop(number, LOST_PEER_GRACE, delivered_at)
        for worker in self.group.running:
            if worker.stopped_with is None:
                worker.stop(number, grace, delivered_at)

    def _waits_in_vain(self, worker: Worker, may_hold: bool) -> bool:
        """Whether this worker, which has lost a peer, waits for its device, and neither answers nor saves anything."""
        match self._specs.progress.stop_of(worker.spec.local_rank):
            case Stop.NO_BLOCK:
                return may_hold and holders.holds_device(worker.pid)
            case stop:
                return stop is Stop.WAITS_FOR_DEVICE

    def kill(self, ranks: Collection[int], why: str, lost_peer: bool = False) -> None:
        """Kill these workers, as a failure of their own; `why` is the clause of `WorkerExit.killed_for`. With
        `lost_peer` they have reported the loss of another one, which may be the cause."""
        self._causes.note_kill(ranks, why, lost_peer)
        for worker in self.group.running:
            if worker.spec.rank in ranks:
                # Not as a stop of ours, so that the round ends with it; it is not reaped, so its pid is its own.
                tree.send_signal(worker.pid, signal.SIGKILL)

    def close(self) -> None:
        """Release the port, the pages of progress and the results, and cancel pending requests."""
        self._closed = True
        self._causes.close()
        self.checkpoints.close()
        if self._port is not None:
            self._port.release()
        if self._handed_over:
            return
        if self._specs.results is not None:
            self._specs.results.close()
        self._specs.startup_probe.close()
        self._specs.progress.close()

    def _note_end(self, worker: Worker) -> None:
        if self._closed:
            # A worker that was stuck, which the kernel has ended after all: this node has left its job because of it.
            return
        self._lasted = time.monotonic() - self._started
        # A checkpoint of this worker was before its end.
        guarded("the marks of checkpoints", self.checkpoints.read, None)
        # The first failure ends the round for all: what the others have done is written before it.
        failed_first = failed_by_itself(worker) and not self.has_failed
        logged = [worker, *self.group.running] if failed_first else [worker]
        guarded("the progress log", lambda: self.progress.log_last(logged), None)
        since = guarded("the end of the script", lambda: self.progress.script_ended(worker), None)
        self._events.emit(exit_event(worker, self.ranks.round, since))
        if failed_first:
            # Before the other workers end too: the kernel forgets their connections.
            self.has_trained = guarded("what was trained", self._specs.startup_probe.has_trained, self.has_trained)
        self._causes.note_end(worker)
        self._on_end(worker)
