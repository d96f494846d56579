"""Survivors as a feature of a node: which workers of a round go on in the next one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlrover_run.agent.framework import AgentServices, FrameworkAdapter
from dlrover_run.agent.result import JobResult
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import RankAssignment, RoundKey
from dlrover_run.features.survivors.survivors import Survivors
from dlrover_run.workers.feature import WorkersFeature
from dlrover_run.workers.round import WorkerRound
from dlrover_run.workers.specs import Worker


class KeptWorkers(WorkersFeature):
    """The workers of this node, which may keep their processes in the next round."""

    meets_elsewhere = True

    def __init__(self, services: AgentServices, tasks: FrameworkAdapter[Any]) -> None:
        super().__init__(services, tasks)
        self._survivors = Survivors(self._note_formed, services.wake, services.console.info)
        self._round: WorkerRound | None = None
        self._kept: frozenset[int] | None = None

    @property
    def pids(self) -> set[int]:
        return self._survivors.pids

    def follow(self, assignment: Assignment, shutting_down: bool) -> None:
        ranks = self._services.node_state.ranks
        self._survivors.follow(assignment, ranks)
        self._kept = None
        if not shutting_down and self._round is not None and ranks is not None:
            self._kept = self._survivors.advance(self._round, ranks)

    def kept(self, current: WorkerRound, ranks: RankAssignment) -> frozenset[int] | None:
        return self._kept

    def may_keep(self, assignment: Assignment) -> bool:
        if assignment.phase is not PlanPhase.GATHERING:
            return False
        return not assignment.needs_idle_node and self._survivors.any_able

    def environment(self, key: RoundKey, local_rank: int) -> Mapping[str, str]:
        return self._survivors.variables(key, local_rank)

    def round_begins(self, workers: WorkerRound) -> None:
        self._round = workers

    def round_runs(self, workers: WorkerRound) -> None:
        self._survivors.start_store(self._services.node_state.key)

    def worker_ended(self, worker: Worker) -> None:
        self._survivors.note_end(worker)

    def store_reached(self, key: RoundKey, address: str) -> None:
        self._survivors.note_store_client(key, address)

    def add_to_report(self, report: NodeReport) -> NodeReport:
        return self._survivors.add_to_report(report)

    async def close(self, result: JobResult) -> None:
        await self._survivors.close()

    def _note_formed(self, local_rank: int) -> None:
        if self._round is not None and self._round.key == self._services.node_state.round:
            self._round.note_formed(local_rank)


NODE = KeptWorkers
