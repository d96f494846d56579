"""Finds out why the workers of a round have failed, and when the cause is certain enough to be reported."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from functools import partial

from msgspec.structs import replace

from dlrover_run.background import Background, every, wait_for_event
from dlrover_run.events.records import Events
from dlrover_run.failures import causes
from dlrover_run.failures.collective_timeouts import LiveWorker, find_absent_workers, inspect_worker
from dlrover_run.failures.guard import guarded, show_unexplained
from dlrover_run.failures.oom_kills import NOTE_INTERVAL, OomKillCounters
from dlrover_run.failures.worker_exit import DeviceError, WorkerExit
from dlrover_run.output.relay_client import RelayClient
from dlrover_run.processes.process import ProcessGroup
from dlrover_run.workers.exits import build_worker_exit, failure_event, read_stderr
from dlrover_run.workers.specs import Worker, WorkerSpec, WorkerSpecs

LOST_PEER_DELAY = 2.0
"""Seconds that a failure which is only the loss of a peer, or whose text says nothing (`causes.may_be_victim`), waits
for the failure of another worker of this node, which explains it: the connections of a failing worker may close before
its traceback is written, and long before it exits."""


FindDeviceError = Callable[[Worker], Awaitable[DeviceError | None]]
"""Looks for an error of its device that explains how a worker has ended by itself. A restart waits for it, so it has a
limit."""


class CauseCollector:
    """What is known of the failures in one round, for its `WorkerRound`, which reports each end of a worker here.
    `on_news` is called when more is known about a failure.
    """

    def __init__(
        self,
        specs: WorkerSpecs,
        group: ProcessGroup[WorkerSpec],
        relay: RelayClient,
        events: Events,
        on_news: Callable[[], None],
    ) -> None:
        self._specs = specs
        self._group = group
        self._relay = relay
        self._events = events
        self._on_news = on_news
        self._oom_kills = OomKillCounters()
        self._noting: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._background = Background(self._note_error)
        self._to_ask: list[Worker] = []
        self._failed: list[WorkerExit] = []
        self._ended = asyncio.Event()
        self._due = 0.0
        self._is_known = False
        self._raised: set[int] = set()
        self._killed: dict[int, str] = {}
        self._lost_peers: set[int] = set()
        self.find_device_error: FindDeviceError | None = None
        self._device_errors: dict[int, DeviceError] = {}
        self._live: list[LiveWorker] = []
        self._emitted_rank: int | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a worker has failed by itself."""
        return self._asking is not None

    @property
    def failure(self) -> WorkerExit | None:
        """The worker whose failure is the root cause, as soon as the cause is known; None while no worker has failed.

        The loss of a peer is reported LOST_PEER_DELAY after it, while other workers run. The cause changes if a worker
        fails whose loss explains the failure known before.
        """
        if self._error is not None:
            raise self._error
        return causes.root_cause(self._failed) if self._is_known else None

    def watch_memory(self) -> None:
        """Read the counters of out-of-memory kills from now on, once a second, until a worker fails by itself."""
        unexplained = partial(show_unexplained, "the out-of-memory kills")
        self._noting = self._background.start(every(NOTE_INTERVAL, self._oom_kills.note, unexplained))

    def note_kill(self, ranks: Collection[int], why: str, lost_peer: bool) -> None:
        """These workers are killed as a failure of their own (`WorkerRound.kill`)."""
        self._killed.update(dict.fromkeys(ranks, why))
        if lost_peer:
            self._lost_peers.update(ranks)

    def note_end(self, worker: Worker) -> None:
        """A worker has ended, perhaps by a failure of its own, whose cause is collected in the background."""
        self._ended.set()
        if not failed_by_itself(worker):
            return
        if not self.has_failed:
            if self._noting is not None:
                self._noting.cancel()
            # Before the other workers end too: the kernel forgets their connections.
            self._live = guarded("the workers that are left", self._inspect_running, [])
            self._due = asyncio.get_running_loop().time() + LOST_PEER_DELAY
        self._to_ask.append(worker)
        if self._asking is None or self._asking.done():
            self._asking = self._background.start(self._ask())

    def describe(self, worker: Worker, tail: str | None) -> WorkerExit:
        """How a worker has ended, by all that is known. `tail` is the end of its standard error at the relay."""
        rank = worker.spec.rank
        raised = worker.stopped_with is not None and rank in self._raised
        end = build_worker_exit(
            worker, self._specs.streams.ranks[worker.spec.local_rank], tail, self._oom_kills, raised
        )
        failed = {ended.spec.rank for ended in self._group.ended if failed_by_itself(ended)}
        live = [left for left in self._live if left.rank not in failed]
        all_here = self._specs.ranks.nodes == 1
        waited_for = guarded("the absent workers", lambda: find_absent_workers(end, live, all_here=all_here), None)
        killed_for, lost = self._killed.get(rank, ""), rank in self._lost_peers
        return replace(
            end,
            waited_for=waited_for,
            killed_for=killed_for,
            has_lost_peer=lost,
            device_error=self._device_errors.get(rank),
        )

    def close(self) -> None:
        """Collect nothing more. Idempotent."""
        self._background.cancel()

    def _note_error(self, error: Exception) -> None:
        """The next question for the `failure` raises it."""
        self._error = error
        self._on_news()

    def _inspect_running(self) -> list[LiveWorker]:
        inspected = (inspect_worker(worker.spec.rank, worker.pid) for worker in self._group.running)
        return [worker for worker in inspected if worker is not None]

    async def _ask(self) -> None:
        """Collect how workers failed, each once; the end of their standard error is at the relay.

        Without it, a worker that has only lost a peer would look like the root cause, and be reported to the job.
        """
        try:
            while all(causes.may_be_victim(end) for end in self._failed):
                if self._to_ask:
                    asked, self._to_ask = self._to_ask, []
                    tails = await self._relay.tails([relay_key(worker) for worker in asked])
                    await self._ask_devices(asked)
                    self._failed += [self.describe(worker, tails.get(relay_key(worker))) for worker in asked]
                elif not await self._another_ends():
                    break
        finally:
            self._is_known = True
            guarded("the event of the failure", self._emit_failure, None)
            self._on_news()

    async def _ask_devices(self, ended: Collection[Worker]) -> None:
        if self.find_device_error is None:
            return
        for worker in ended:
            try:
                error = await self.find_device_error(worker)
            except Exception as problem:
                show_unexplained("the errors of devices", problem)
                continue
            if error is not None:
                self._device_errors[worker.spec.rank] = error

    async def _another_ends(self) -> bool:
        """Whether another worker ends by LOST_PEER_DELAY after the first failure. If not, those that have raised an
        error of their own and are still exiting are noted, because they are stopped next."""
        self._ended.clear()
        running = [worker for worker in self._group.running if worker.stopped_with is None]
        if not running or self._is_known:
            return False
        if await wait_for_event(self._ended, self._due - asyncio.get_running_loop().time()):
            return True
        tails = await self._relay.tails([relay_key(worker) for worker in running])
        for worker in running:
            stderr = read_stderr(self._specs.streams.ranks[worker.spec.local_rank], tails.get(relay_key(worker)))
            if worker.stopped_with is None and causes.raised_own_error(stderr):
                self._raised.add(worker.spec.rank)
        return False

    def _emit_failure(self) -> None:
        """Write the root cause to the event log; again if it has changed."""
        root = causes.root_cause(self._failed)
        if root is None or root.rank == self._emitted_rank:
            return
        self._emitted_rank = root.rank
        self._events.emit(failure_event(root, self._specs.ranks.round))


def failed_by_itself(worker: Worker) -> bool:
    """Whether a worker that has ended failed, and was not stopped."""
    return worker.code != 0 and worker.stopped_with is None


def relay_key(worker: Worker) -> str:
    """The key of the worker at the relay."""
    return str(worker.spec.local_rank)
