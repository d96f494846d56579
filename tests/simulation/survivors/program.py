"""The program of a run: a job of torch whose workers outlive their round, beside nodes whose workers do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random

from msgspec.structs import replace

from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.survivors.model import Store, SurvivorsAssignment
from dlrover_run.features.survivors.rules import SurvivorsRules
from simulation.nodes import job_spec
from simulation.survivors.nodes import SurvivorNode
from simulation.survivors.processes import BLOCK, OLDER, WITHOUT, Group, Groups, Order, WorkerProcess
from simulation.timeline import demand
from simulation.torch.invariants import TorchInvariants
from simulation.torch.program import TorchProgram

REACTION = 1.0
"""Seconds that an agent may be late."""


class SurvivorsInvariants(TorchInvariants):
    """The invariants of groups that form in place, besides those of rounds."""

    program: SurvivorsProgram

    def forming(self, group: Group) -> None:
        """Check a group that is complete."""
        members = [group.members[rank] for rank in range(group.size)]
        orders = [one.order for one in members]
        demand(all(one.alive for one in members), "no worker trains with a dead one")
        demand(all(order is not None and order.key == group.key for order in orders), "a world is of one round")
        sizes = {order.world for order in orders if order is not None}
        demand(sizes == {group.size}, "the workers of a group know its size")
        if group.in_place:
            self.program.groups_in_place += 1
            kept = [one for one in members if one.node.slots[one.local_rank].record.started != group.key]
            self.program.kept += len(kept)
        if self.calm:
            others = [one for one in self.program.groups.all if one.complete and not one.ended and one is not group]
            demand(not others, "one world at a time")

    def ordering(self, process: WorkerProcess, order: Order) -> None:
        """Check that a worker that does not answer an order is not waited for any longer than the limit."""
        node, timeline, since = process.node, self.program.timeline, self.program.timeline.now
        record = node.slots[process.local_rank].record

        def check() -> None:
            slot = node.slots.get(process.local_rank)
            if slot is None or slot.process is not process or slot.stopping or not node.alive or node.stopped:
                return
            if node.disturbed_at >= since or node.left or node.is_leaving or node.ranked_in is None:
                return
            if node.round is not None and node.round.failure is not None:
                return
            if order.formation is None:
                # One that forms its group as in any script does not answer any more.
                answered = slot.record.offered != record.offered or slot.record.informed == order.key
                demand(answered, "a round waits for no worker longer than the limit")
            elif order.formation.in_place and slot.record.asked == order.key:
                done = slot.record.formed == order.key or slot.record.lost == order.key
                demand(done, "a group that does not form within the limit fails its round")

        timeline.after(order.timeout + REACTION, check)

    def replacing(self, process: WorkerProcess, part: SurvivorsAssignment) -> None:
        """Check that a worker that could keep its process is not stopped."""
        today = part.formation is not None and not part.formation.in_place
        could = process.node.kind == BLOCK and process.in_place and process.store == part.store is not None
        has_connected = process.node.slots[process.local_rank].record.able
        demand(today or not could or not has_connected, "a survivor keeps its process")


class SurvivorsProgram(TorchProgram):
    """Most nodes have scripts whose workers can outlive their round. `kept` counts workers that did, in groups of which
    there were `groups_in_place`, and `given_up` those that did not answer in time."""

    flag = " --survivors"

    invariants: SurvivorsInvariants

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self._own = Random(f"survivors of {self._seed}")
        self._mixed = self._own.random() < 0.2
        self._ports = itertools.count(20_000)
        self.kept = 0
        self.given_up = 0
        self.groups_in_place = 0

    def rules(self, random: Random) -> JobRules:
        timeout = self._own.choice((5.0, 15.0, 30.0))
        return replace(super().rules(random), parts=(SurvivorsRules(reconfigure_timeout=timeout),))

    def make_invariants(self, durable: bool, nodes_stay: bool) -> SurvivorsInvariants:
        self.health.mode = 0
        self.invariants = SurvivorsInvariants(self.scenario.rules, durable, nodes_stay, self.health)
        self.invariants.program = self
        return self.invariants

    def furnish(self) -> None:
        super().furnish()
        self.groups = Groups(self.timeline, self._seed, self.workers, self.timeline.random.uniform(3, 60))
        self.groups.formed = self.invariants.forming
        self.groups.is_alive = self._has_store
        self.workers.marks_every = 0.0
        # Some survivors are given up first.
        self.workers.patience += 3 * SurvivorsRules.get(self.scenario.rules.parts).reconfigure_timeout

    def new_store_port(self) -> int:
        return next(self._ports)

    def new_node(self, name: str, number: int, is_return: bool) -> SurvivorNode:
        kind = self._own.choice((BLOCK, OLDER, WITHOUT)) if self._mixed and self._own.random() < 0.3 else BLOCK
        spec = job_spec(name, f"10.1.0.{number}", self._own.randint(1, 3), "default", None, self.scenario.rules)
        return SurvivorNode(self, spec, f"{name}.{number}" if is_return else name, f"i{number}", kind)

    def faults(self) -> list[Callable[[], None]]:
        return [lambda: self._fail(False), lambda: self._fail(True), self._deafen, self._end_store]

    def calm(self) -> None:
        super().calm()
        self.groups.calm = True

    @property
    def nodes(self) -> list[SurvivorNode]:
        return [node for node in self.scenario.nodes if isinstance(node, SurvivorNode)]

    def _has_store(self, store: Store) -> bool:
        return any(node.hosts(store) for node in self.nodes if node.key == NodeKey(*store.node))

    def _any_process(self) -> WorkerProcess | None:
        found = [slot.process for node in self.nodes if node.alive for slot in node.slots.values() if not slot.stopping]
        return self.timeline.random.choice(found) if found else None

    def _fail(self, killed: bool) -> None:
        if (process := self._any_process()) is not None:
            self.groups.fail(process, killed)

    def _deafen(self) -> None:
        if (process := self._any_process()) is not None:
            process.deaf = True

    def _end_store(self) -> None:
        node = self._any_node()
        if isinstance(node, SurvivorNode):
            node.end_store()


class PreparingSurvivorsProgram(SurvivorsProgram):
    """The same jobs, whose nodes prepare."""

    flag = " --survivors --preparing"
    nodes_prepare = True
