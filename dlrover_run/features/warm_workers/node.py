"""Warm workers as a feature of a node: prepared while its workers train, taken when they start again."""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from dlrover_run.agent.framework import AgentServices, FrameworkAdapter
from dlrover_run.agent.result import JobResult
from dlrover_run.background import Background
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.devices import holders
from dlrover_run.events.records import WorkerPrepared
from dlrover_run.features.warm_workers.choice import MAX_DEATHS, Warm, changes, lasting, prepares_at, use_of
from dlrover_run.words.log_level import internal_error, log_frames
from dlrover_run.workers.ahead import WorkerAhead
from dlrover_run.workers.environment import environments_before_ranks
from dlrover_run.workers.feature import WorkersFeature
from dlrover_run.workers.round import WorkerRound
from dlrover_run.workers.specs import Worker, WorkerSpec
from dlrover_run.workers.template_client import TemplateError

LOOK_INTERVAL = 1.0
"""Seconds between two looks at whether the workers train."""

FLAG = "--warm-workers"


class Prepared(NamedTuple):
    """A warm worker of this node, and what decides whether it may be used."""

    process: WorkerAhead
    warm: Warm


class WarmWorkers(WorkersFeature):
    """The warm workers of this node by local rank. An error of one never fails a start: its worker is forked as without
    it."""

    def __init__(self, services: AgentServices, tasks: FrameworkAdapter[Any]) -> None:
        super().__init__(services, tasks)
        self._starter = tasks.starter
        self._prepared: dict[int, Prepared] = {}
        self._done: set[int] = set()
        self._deaths = 0
        self._said: set[str] = set()
        self._wanted = asyncio.Event()
        self._preparing: asyncio.Task[None] | None = None
        self._background = Background(self._note_internal_error)

    @property
    def pids(self) -> set[int]:
        return {one.process.pid for one in self._prepared.values() if not one.process.closed.done()}

    def open(self) -> None:
        self._starter.recording_goes_on = True

    def follow(self, assignment: Assignment, shutting_down: bool) -> None:
        if shutting_down:
            self._stop_preparing()
            self._end(*self._prepared)

    def round_begins(self, workers: WorkerRound) -> None:
        self._stop_preparing()
        self._done.clear()
        self._end(*changes((), (), self._prepared, workers.ranks.workers).end)

    def round_runs(self, workers: WorkerRound) -> None:
        if self._deaths < MAX_DEATHS:
            self._preparing = self._background.start(self._prepare_all(workers))

    def round_ends(self) -> None:
        self._stop_preparing()

    def worker_ended(self, worker: Worker) -> None:
        if worker.code == 0 and worker.stopped_with is None:
            self._done.add(worker.spec.local_rank)
            self._wanted.set()

    async def prepared(self, spec: WorkerSpec, until: asyncio.Future[Any] | None) -> int | None:
        one = self._prepared.get(spec.local_rank)
        use = use_of(one.warm if one else None, spec.environment)
        if use == "environment":
            self._end(spec.local_rank)
        if one is None or use != "ready":
            return None
        pid = await self._starter.start_ahead(one.process, spec, until)
        # Only now: until then it must not be taken for an orphan. From now on it is known as a worker.
        self._prepared.pop(spec.local_rank, None)
        return pid

    async def close(self, result: JobResult) -> None:
        await self._background.close()
        for one in list(self._prepared.values()):
            await one.process.close()

    async def _prepare_all(self, workers: WorkerRound) -> None:
        """Have a warm worker beside each worker of this round, once they train, for as long as it lasts."""
        await self._until_trained(workers)
        await self._starter.learn()
        while self._deaths < MAX_DEATHS:
            self._wanted.clear()
            running = {one.spec.local_rank: one for one in workers.group.running}
            wanted = changes(running, self._done, self._prepared, workers.ranks.workers)
            self._end(*wanted.end)
            for local_rank in wanted.prepare:
                # One after the other, so that they take no more than one processor from the workers.
                if not await self._prepare(running[local_rank], workers):
                    return
            if not wanted.prepare:
                await self._wanted.wait()

    async def _until_trained(self, workers: WorkerRound) -> None:
        stepped = met = None
        while True:
            now = time.monotonic()
            running = {one.spec.name for one in workers.group.running}
            if stepped is None and running and running <= workers.progress.by_name().keys():
                stepped = now
            if met is None and workers.specs.startup_probe.has_trained():
                met = now
            at = prepares_at(stepped, met)
            if at is not None and at <= now:
                return
            await asyncio.sleep(LOOK_INTERVAL)

    async def _prepare(self, worker: Worker, workers: WorkerRound) -> bool:
        """Prepare one beside this worker. Returns whether others of this round can be."""
        local_rank, began = worker.spec.local_rank, time.monotonic()
        before = environments_before_ranks(self._services.job, os.environ)[local_rank :: workers.ranks.workers]
        environment = lasting(worker.spec.environment, before, os.environ)
        device = holders.is_present() and holders.holds_device(worker.pid)
        try:
            # It is a child of this process before its pid is known here.
            with self._services.orphans.paused():
                spec = replace(worker.spec, environment=environment)
                process = await self._starter.fork_ahead(spec, local_rank, device)
                self._prepared[local_rank] = Prepared(process, Warm(environment, waits=False))
        except TemplateError as error:
            self._note_none(str(error))
            return False
        try:
            answer = await process.prepare()
        except TemplateError as error:
            self._prepared.pop(local_rank, None)
            self._note_death(local_rank, str(error))
            return True
        except asyncio.CancelledError:
            self._prepared.pop(local_rank, None)
            raise
        process.on_end = partial(self._note_end, local_rank)
        self._prepared[local_rank] = Prepared(process, Warm(environment, waits=True))
        self._services.events.emit(
            WorkerPrepared(
                round=workers.ranks.round,
                rank=worker.spec.rank,
                local_rank=local_rank,
                pid=process.pid,
                since=began,
                device=answer["device"],
            )
        )
        return True

    def _end(self, *local_ranks: int) -> None:
        for local_rank in local_ranks:
            self._background.start(self._prepared.pop(local_rank).process.close())

    def _stop_preparing(self) -> None:
        if self._preparing is not None:
            self._preparing.cancel()
            self._preparing = None

    def _note_end(self, local_rank: int, how: str) -> None:
        self._prepared.pop(local_rank, None)
        self._note_death(local_rank, how)
        self._wanted.set()

    def _note_none(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            self._services.console.info(f"{FLAG}: no warm workers are prepared: {why}")

    def _note_death(self, local_rank: int, how: str) -> None:
        self._deaths += 1
        after = "another one is prepared" if self._deaths < MAX_DEATHS else "no more are prepared"
        self._services.console.info(f"{FLAG}: the warm worker of local rank {local_rank} {how}; {after}")

    def _note_internal_error(self, error: Exception) -> None:
        self._deaths = MAX_DEATHS
        self._services.console.info(f"{FLAG}: {internal_error(error)}; no more warm workers are prepared")
        log_frames(self._services.console.info, error)


NODE = WarmWorkers
