"""Starts the rounds of a node one after the other: with new workers only, or with some of those that run."""

from __future__ import annotations

import os
from asyncio import Future
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from dlrover_run.agent.framework import AgentServices
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.round import RankAssignment, RoundKey
from dlrover_run.workers.feature import WorkersFeature
from dlrover_run.workers.reporter import EventLog, ProgressReporter
from dlrover_run.workers.round import WorkerRound
from dlrover_run.workers.round_store import RoundStores, StorePort
from dlrover_run.workers.specs import Worker, WorkerSpec, WorkerSpecs, build_worker_specs, launcher_environments
from dlrover_run.workers.starter import Starter

if TYPE_CHECKING:
    from dlrover_run.torchrun.logs_specs import LogsDestinations, LogsSpecsClient

RESTART_DRAIN_TIMEOUT = 0.5
"""Seconds without progress after which a restart no longer waits for a console to print the old workers' output."""


class RoundStarter:
    """The rounds of this node, for `TorchAdapter`, which begins one start at a time. `current` is the round whose
    workers were started last, until another one begins or it is closed."""

    def __init__(
        self, services: AgentServices, starter: Starter, reporter: ProgressReporter, event_log: EventLog
    ) -> None:
        self._services = services
        self._spec = spec = services.job
        self._starter = starter
        self._reporter = reporter
        self._event_log = event_log
        self._assignment = Assignment()
        self._shutting_down = False
        self.current: WorkerRound | None = None
        self.stores = RoundStores(os.environ, services.console.info, self._note_store_client)
        self._plugin: LogsSpecsClient | None = None
        if spec.logs.plugin is not None:
            from dlrover_run.torchrun.logs_specs import LogsSpecsClient

            self._plugin = LogsSpecsClient(spec.logs)

    @property
    def pids(self) -> set[int]:
        """The processes of the current round, and of the class that places its output."""
        plugin = self._plugin.pids if self._plugin is not None else set()
        return plugin | (self.current.pids if self.current is not None else set())

    @property
    def features(self) -> list[WorkersFeature]:
        """The features of the job that follow its rounds."""
        return self._services.features_of(WorkersFeature)

    def accept(self, assignment: Assignment, shutting_down: bool) -> None:
        """Take the latest assignment (`Lifetime.accept`)."""
        self._assignment, self._shutting_down = assignment, shutting_down

    def is_wanted(self, ranks: RankAssignment) -> bool:
        """Whether these are still this node's ranks after a wait."""
        services = self._services
        return not (self._shutting_down or services.shutdown.requested) and services.node_state.round == ranks.key

    async def restart(self, ranks: RankAssignment) -> None:
        """Start all workers of a round, once those of the last one have ended. Raises what ends the node."""
        before = self.current
        if before is not None:
            for feature in self.features:
                await feature.before_cleanup()
            if not self.is_wanted(ranks):
                return
            # Now, as a command of the user before a round may look at the devices, which an orphan may hold.
            self._end_orphans()
        for feature in self.features:
            await feature.before_round(ranks, partial(self.is_wanted, ranks))
        if not self.is_wanted(ranks):
            return
        if before is not None:
            await before.collect_exit_info(RESTART_DRAIN_TIMEOUT)
            if not self.is_wanted(ranks):
                return
            self._reporter.end_round(before, self._assignment, ranks)
            self.close_round()
            self.current = None
        placed = await self._place_output(ranks)
        if not (self._may_start(placed) and self.is_wanted(ranks)):
            return
        self._reporter.begin_round(ranks)
        await self._start(self._open(self._build_specs(ranks, placed), self._open_store(ranks)))
        self._event_log.round_started(ranks)

    async def replace(self, before: WorkerRound, ranks: RankAssignment) -> None:
        """Start workers in place of those of `before` that were stopped, once these have ended. The others go on: in
        the next round, or in `before` itself, if these are its ranks. Raises what ends the node."""
        is_same = before.key == ranks.key

        def is_wanted() -> bool:
            return self.is_wanted(ranks) and not (is_same and before.has_failed)

        for feature in self.features:
            await feature.before_round(ranks, is_wanted)
        await before.stopped()
        for feature in self.features:
            await feature.before_cleanup()
        if not is_wanted():
            return
        await before.collect_exit_info(RESTART_DRAIN_TIMEOUT, others_go_on=True)
        if not is_wanted():
            return
        placed = await self._place_output(ranks)
        if not (self._may_start(placed) and is_wanted()):
            return
        if not is_same:
            self._reporter.end_round(before, self._assignment, ranks)
            self._reporter.begin_round(ranks)
        kept = {worker.spec.local_rank for worker in before.group.running if worker.stopped_with is None}
        specs = self._build_specs(ranks, placed, before.specs, kept)
        started = self._open(specs, before.give_port() if is_same else self._open_store(ranks))
        self._end_watches()
        started.carry_on(before, kept)
        await self._start(started)
        if not is_same:
            self._event_log.round_started(ranks)

    def stop_all_but(self, kept: Collection[int]) -> None:
        """Stop the workers of the current round without these local ranks. Idempotent."""
        assert self.current is not None, "they run"
        for worker in self.current.group.running:
            if worker.spec.local_rank not in kept and worker.stopped_with is None:
                worker.stop(*self._services.shutdown.stop_with(self._spec.shutdown_timeout))

    def stop_waiting(self) -> None:
        """Have a start that is under way end early, and no node waited for at the end."""
        self.stores.stop_waiting()
        if self._plugin is not None:
            self._plugin.stop_waiting()
        if self.current is not None:
            self.current.cancel()

    def close_round(self) -> None:
        """Release what was opened for the current round, whose workers have ended."""
        if self.current is not None:
            # First, because they read the files of the round.
            self._end_watches()
            self.current.close()

    async def close(self) -> None:
        """End the process of the class that places the output."""
        if self._plugin is not None:
            await self._plugin.close()

    async def _place_output(self, ranks: RankAssignment) -> LogsDestinations | None:
        """Where the class of --logs-specs puts the output of a round; None without it, or if it is not waited for."""
        if self._plugin is None:
            return None
        return await self._plugin.answer(launcher_environments(self._spec, ranks, os.environ))

    def _may_start(self, placed: LogsDestinations | None) -> bool:
        return self._plugin is None or placed is not None

    def _build_specs(
        self,
        ranks: RankAssignment,
        placed: LogsDestinations | None,
        before: WorkerSpecs | None = None,
        kept: Collection[int] = (),
    ) -> WorkerSpecs:
        """What the workers of a round are started with; those `kept` have it from the round `before`."""

        def own_variables(local_rank: int) -> Mapping[str, str]:
            variables: dict[str, str] = {}
            for feature in self.features:
                variables |= feature.environment(ranks.key, local_rank)
            return variables

        services = self._services
        return build_worker_specs(
            self._spec,
            ranks,
            os.environ,
            services.run_dir.path,
            services.relay,
            placed,
            own=own_variables,
            before=before,
            kept=kept,
        )

    def _open_store(self, ranks: RankAssignment) -> StorePort | None:
        return self.stores.open(self._services.node_state.take_port(), ranks)

    def _open(self, specs: WorkerSpecs, port: StorePort | None) -> WorkerRound:
        services = self._services
        return WorkerRound(specs, port, services.relay, self._note_end, services.wake, services.events)

    async def _start(self, started: WorkerRound) -> None:
        """Start the workers of a round, but for those that it has taken over."""
        self.current = started
        for feature in self.features:
            feature.round_begins(started)
        meets_here = not any(feature.meets_elsewhere for feature in self.features)
        with self._services.orphans.paused():
            await started.start(self._starter, meets_here, self._prepared)
            for feature in self.features:
                feature.round_runs(started)
        self._starter.import_later()

    async def _prepared(self, spec: WorkerSpec, until: Future[Any] | None) -> int | None:
        for feature in self.features:
            if (pid := await feature.prepared(spec, until)) is not None:
                return pid
        return None

    def _end_orphans(self) -> None:
        """End what the workers of a round have left behind, and return when it has ended if the next round needs what
        it may hold: with ranks from flags, the port on which a child of rank 0 may still listen."""
        orphans = self._services.orphans
        if self._spec.rendezvous.ranked:
            orphans.end_now()
        else:
            orphans.kill_orphans()

    def _end_watches(self) -> None:
        for feature in self.features:
            feature.round_ends()

    def _note_store_client(self, key: RoundKey, address: str) -> None:
        for feature in self.features:
            feature.store_reached(key, address)

    def _note_end(self, worker: Worker) -> None:
        for feature in self.features:
            feature.worker_ended(worker)
        self._services.wake()
        orphans = self._services.orphans
        orphans.reap()
        if self.current is not None and self.current.group.live:
            # At the end of the round all orphans are killed, whatever their session.
            orphans.kill_session(worker.pid)
