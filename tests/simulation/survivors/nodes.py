"""Nodes whose workers outlive their round: `NodeState`, `build_report` and `next_step` of the product."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import PlannedChange, RankAssignment, RoundKey
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.features.survivors.model import Formation, Store, SurvivorsAssignment
from dlrover_run.features.survivors.text import SurvivorsCode
from dlrover_run.features.survivors.worker_record import (
    Step,
    WorkerRecord,
    ended_before_its_group,
    follow,
    next_step,
    node_part,
)
from dlrover_run.spec import JobSpec
from dlrover_run.workers.adapter import build_report
from simulation.survivors.processes import BLOCK, OLDER, WITHOUT, Order, WorkerProcess
from simulation.torch.nodes import TorchNode
from simulation.torch.workers import OWN_WORDS, PEER_WORDS

if TYPE_CHECKING:
    from simulation.survivors.program import SurvivorsProgram


@dataclass
class Slot:
    """A local rank: its process, what the agent knows of it, and whether it is being stopped."""

    process: WorkerProcess
    record: WorkerRecord
    stopping: bool = False


class Round:
    """The workers of a node in one round, as `build_report` reads them."""

    has_trained = saves = False
    saved_for: PlannedChange | None = None
    change: PlannedChange | None = None

    def __init__(self, ranks: RankAssignment) -> None:
        self.key = ranks.key
        self.workers = ranks.workers
        self.failure: WorkerExit | None = None
        self.done: set[int] = set()

    @property
    def group(self) -> Round:
        return self

    @property
    def checkpoints(self) -> Round:
        return self

    @property
    def succeeded(self) -> bool:
        return len(self.done) == self.workers and self.failure is None


class SurvivorNode(TorchNode):
    """One agent with its workers. `kind` is that of its script."""

    def __init__(self, program: SurvivorsProgram, spec: JobSpec, host: str, incarnation: str, kind: str) -> None:
        self.kind = kind
        self.slots: dict[int, Slot] = {}
        self.round: Round | None = None
        self.part: SurvivorsAssignment | None = None
        self.store_port = program.new_store_port()
        self.disturbed_at = 0.0
        self._getting_ready: asyncio.Task[None] | None = None
        self._survivors = program
        super().__init__(program, spec, host, incarnation)

    @property
    def works(self) -> bool:
        live = [slot for slot in self.slots.values() if slot.record.formed == self._state.round and not slot.stopping]
        plain = [slot for slot in self.slots.values() if not slot.process.in_place or self.kind == WITHOUT]
        return self.round is not None and len({*map(id, live), *map(id, plain)}) == self.round.workers

    def resume(self) -> None:
        self.disturbed_at = self.timeline.now
        super().resume()

    def hosts(self, store: Store) -> bool:
        """Whether this node runs that store."""
        return self.alive and store.node == self.key and store.port == self.store_port

    def end_store(self) -> None:
        """The process of the store ends."""
        self.note("its store ends")
        self.store_port = self._survivors.new_store_port()
        self.run(self._receive)

    def hear(self, process: WorkerProcess, word: str, key: RoundKey, text: str) -> None:
        """Take a message of a worker."""
        slot = self.slots.get(process.local_rank)
        if slot is not None and slot.process is process:
            self.run(lambda: self._hear(slot, word, key, text))

    def _hear(self, slot: Slot, word: str, key: RoundKey, text: str) -> None:
        record, now = slot.record, self.time()
        if word == "hello" and self.kind == OLDER:
            slot.record = replace(record, unable=(SurvivorsCode.OLDER_TORCH(version="2.13.0"),))
        elif word == "hello":
            slot.record = record.note_hello()
        elif word == "offer":
            slot.record = record.note_offer(key, text)
        elif word == "formed":
            slot.record = record.note_formed(key)
            if self.round is not None and self.round.key == key:
                self.round.has_trained = True
        else:
            slot.record = record.note_lost(key, now)
        self._receive()

    def note_end(self, process: WorkerProcess, code: int, words: str) -> None:
        """A worker has ended."""
        slot = self.slots.get(process.local_rank)
        if slot is None or slot.process is not process:
            return
        del self.slots[process.local_rank]
        current = self.round
        if current is not None and not slot.stopping and current.key == self._state.round:
            if ended_before_its_group(slot.record, current.key, code):
                self.note(f"replaces worker {process.pid}, which has ended")
            elif code == 0:
                current.done.add(process.local_rank)
                if current.succeeded and self._state.ranks is not None:
                    self._survivors.invariants.succeeding(self.key, self._state.ranks)
            elif current.failure is None:
                rank = 0 if self._state.ranks is None else self._state.ranks.first_rank + process.local_rank
                current.failure = WorkerExit(rank, process.local_rank, 1, code, 0.0, stderr_tail=words)
                if words != PEER_WORDS:
                    self._survivors.workers.failed.add(current.key)
        self.run(self._receive)

    def _report(self) -> None:
        if self.left:
            return
        wanted = self.rendezvous.assignment
        if not self._leaving:
            self._survivors.invariants.taking(self.key, wanted)
            self._epoch = wanted.epoch
            self._state.accept(wanted)
            self._follow_round(SurvivorsAssignment.find(wanted.parts))
            if wanted.drains:
                self._begin_to_leave()
        report = build_report(self._state, cast(Any, self.round), self._leaving, self.is_preparing)
        self._reports_preparing = report.preparing
        self.rendezvous.report(self._with_part(report))

    def _with_part(self, report: NodeReport) -> NodeReport:
        if self.kind == WITHOUT:
            return report
        records = [self.slots[rank].record for rank in sorted(self.slots)]
        workers = 0 if self._state.ranks is None else self._state.ranks.workers
        part = self.part or SurvivorsAssignment()
        return replace(report, parts=with_part(report.parts, node_part(records, workers, part, self.store_port)))

    def _follow_round(self, given: SurvivorsAssignment | None) -> None:
        ranks = self._state.ranks
        if ranks is None:
            self.round = self.part = None
            return
        self.part = follow(self.part, given, ranks.key)
        if self.round is None or self.round.key != ranks.key:
            self.round = Round(ranks)

    def _follow(self) -> None:
        if self.left:
            return
        self._report()
        if self._leaving or self._is_over or self.rendezvous.problem is not None:
            if not self.slots:
                self._leave()
            for slot in list(self.slots.values()):
                self._stop(slot)
            return
        ranks, current = self._state.ranks, self.round
        if ranks is None or current is None:
            if self.rendezvous.assignment.phase is PlanPhase.GATHERING and self.kind == BLOCK:
                return
            for slot in list(self.slots.values()):
                self._stop(slot)
            return
        # Those that have only lost others come last, as the agent tells these apart.
        lost = {rank for rank, slot in self.slots.items() if slot.record.lost == current.key}
        for local_rank in sorted(range(ranks.workers), key=lambda rank: (rank in lost, rank)):
            found = self.slots.get(local_rank)
            if found is None:
                if current.failure is None and local_rank not in current.done:
                    self._start_worker(local_rank, ranks)
            elif not found.stopping and current.failure is None:
                self._act(found, ranks)
            elif not found.stopping and found.record.started != current.key and self.kind == WITHOUT:
                self._stop(found)

    def _act(self, slot: Slot, ranks: RankAssignment) -> None:
        assert self.part is not None, "a node with ranks has a part"
        if self.kind == WITHOUT:
            if slot.record.started != ranks.key:
                self._stop(slot)
            return
        due = next_step(slot.record, self.part, self.time())
        process, key = slot.process, ranks.key
        if due.at is not None:
            self.call_at(due.at, self._wake)
        if due.step is Step.ASK:
            slot.record = slot.record.note_asked(key, self.time())
            self._send(slot, ranks, None)
        elif due.step is Step.FORM:
            assert self.part.formation is not None, "it is known how the group forms"
            slot.record = slot.record.note_informed(self.part.formation, self.time())
            self._send(slot, ranks, self.part.formation)
        elif due.step is Step.REPLACE:
            self._survivors.invariants.replacing(process, self.part)
            self._stop(slot)
        elif due.step is Step.GIVE_UP:
            self.note(f"gives up worker {process.pid}")
            self._survivors.given_up += 1
            slot.stopping = True
            process.end(-9)
        elif due.step is Step.FAIL:
            self.note(f"fails worker {process.pid}")
            if slot.record.formed != key:
                # A group that does not form is a failure of its own, whatever the reason.
                self._survivors.workers.failed.add(key)
            process.end(-9, PEER_WORDS if slot.record.lost == key else OWN_WORDS)

    def _send(self, slot: Slot, ranks: RankAssignment, formation: Formation | None) -> None:
        assert self.part is not None, "a node with ranks has a part"
        rank = ranks.first_rank + slot.process.local_rank
        order = Order(ranks.key, rank, ranks.world_size, self.part.timeout, formation)
        self._survivors.invariants.ordering(slot.process, order)
        slot.process.send(order)
        # What is due next, if it does not answer.
        self.call_soon(self._follow)

    def _start_worker(self, local_rank: int, ranks: RankAssignment) -> None:
        assert self.part is not None, "a node with ranks has a part"
        if local_rank == 0:
            self._state.take_port()
        process = WorkerProcess(self._survivors.groups, self, local_rank, self.part.store)
        self.slots[local_rank] = Slot(process, WorkerRecord(started=ranks.key, store=self.part.store))
        first = Order(ranks.key, ranks.first_rank + local_rank, ranks.world_size, self.part.timeout)

        def start() -> None:
            self._survivors.groups.later(self._program.slow_start, lambda: process.begin(first))

        if self._starter is None:
            start()
            return
        if self._getting_ready is None or self._getting_ready.done():
            # Once for all workers of the round.
            self._getting_ready = self.create_task(self._starter.prepare([{}]))
        self._getting_ready.add_done_callback(lambda _: start())

    def _stop(self, slot: Slot) -> None:
        if not slot.stopping:
            slot.stopping = True
            random = self._survivors.groups.random
            self.call_later(random.uniform(0, self._program.slow_stop) * random.random(), slot.process.end, -15)

    def _wake(self) -> None:
        self.call_soon(self._follow)

    def _end_tasks(self) -> None:
        for slot in list(self.slots.values()):
            slot.stopping = True
            slot.process.end(-9)
