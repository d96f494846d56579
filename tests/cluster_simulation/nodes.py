"""Nodes: an agent that brings its tasks nearer to its order, as the product's own pure function says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from policy_parts import order_of
from simulation.parameter_servers.tensorflow import LEFT, Process
from simulation.timeline import demand

from dlrover_run.agent.reconcile import (
    Action,
    Release,
    Reserve,
    Start,
    Stop,
    StopMode,
    WaitForPeers,
    reconcile,
)
from dlrover_run.coordination.model import OVER, Assignment, NodeKey, NodePhase, NodeReport, RoundKey
from dlrover_run.policies.parameter_servers.model import (
    Capacity,
    DesiredReplicas,
    EndCause,
    PlannedTask,
    Role,
    TaskEnd,
    TaskKey,
    TaskStage,
    TaskStatus,
)
from dlrover_run.policies.parameter_servers.orders import NodeOrder
from dlrover_run.policies.parameter_servers.reports import NodeTasks
from tf_ps_runner.agent.desired import LocalTask, desired_tasks, task_states
from tf_ps_runner.tf_config import servers_of

if TYPE_CHECKING:
    from cluster_simulation.world import World

FORCED = TaskEnd(EndCause.FAILURE, "was killed by SIGKILL")
GRACE = 3.0
"""Seconds after which an agent kills what does not leave."""


@dataclass
class Slot:
    """What an agent knows of one task."""

    task: PlannedTask
    port: int = 0
    process: Process | None = None
    end: TaskEnd | None = None
    stopping: StopMode | None = None
    waited: bool = False


class Node:
    """One launcher. `cut` says that its network is gone, and `stale` that it has heard nothing since it was."""

    def __init__(self, world: World, name: str, incarnation: int, rooms: tuple[Capacity, ...]) -> None:
        self.world = world
        self.key = NodeKey(name, str(incarnation))
        self.rooms = rooms
        self.alive = True
        self.cut = False
        self.stale = False
        self.heard_again = False
        self.phase = NodePhase.WAITING
        self.order: NodeOrder | None = None
        self.heard = RoundKey()
        self.epoch = 0
        self.over = False
        self.slots: dict[TaskKey, Slot] = {}
        self.scale_request: DesiredReplicas | None = None
        self.scale_request_number = 0
        self._ports: dict[tuple[Role, int], int] = {}

    def note(self, what: str) -> None:
        self.world.timeline.note(f"{self.key.node_id}.{self.key.incarnation}", what)

    def talks_to(self, other: Node) -> bool:
        return self is other or not (self.cut or other.cut)

    def order_for(self, task: PlannedTask) -> NodeOrder | None:
        """What a process is told: nothing any more once its version is over."""
        order = self.order
        return order if order is not None and order.version == task.version else None

    def status(self) -> NodeReport:
        tasks = tuple(self._told(slot) for slot in self.slots.values() if slot.port)
        return NodeReport(
            node_id=self.key.node_id,
            incarnation=self.key.incarnation,
            host=self.key.node_id,
            address=self.key.node_id,
            port=1,
            workers=0,
            phase=self.phase,
            known_round=self.heard,
            epoch=self.epoch,
            policy=NodeTasks(
                capacity=self.rooms,
                tasks=tasks,
                scale_request=self.scale_request,
                scale_request_number=self.scale_request_number,
            ),
        )

    def publish(self) -> None:
        """Something has changed: the coordinator hears of it, if it can."""
        if self.alive:
            self.world.network.report(self)

    def hear(self, told: Assignment) -> None:
        if not self.alive or told.epoch < self.epoch or (order_of(told) is not None and order_of(told).keep):
            return
        self.epoch = told.epoch
        self.heard = told.key
        self.over = told.phase in OVER
        self.heard_again = True
        self.order = order_of(told)
        self.look()
        self.stale = self.stale and self._obeys_late()
        self.publish()

    def look(self) -> None:
        """Take the next steps."""
        if not self.alive:
            return
        here = tuple(self._local(slot) for slot in self.slots.values())
        order = self.order or NodeOrder(version=0)
        ends = self.over or self.phase is NodePhase.LEFT
        for step in reconcile(desired_tasks(order, here, sparse=False), task_states(order, here), ends):
            self._take(step, order)

    def leave(self) -> None:
        """Somebody asks the node to go: it has some seconds."""
        if self.phase is not NodePhase.WAITING:
            return
        self.note("is asked to leave")
        self.phase = NodePhase.LEAVING
        self.publish()

        def go() -> None:
            if self.alive:
                self.note("leaves")
                self.phase = NodePhase.LEFT
                for slot in self.slots.values():
                    if slot.process is not None:
                        slot.process.kill()
                self.slots.clear()
                self.publish()
                self.world.timeline.after(0.2, self.die)

        self.world.timeline.after(self.world.timeline.random.uniform(0.5, 8), go)

    def die(self) -> None:
        """The node, and all that it hosts, is gone."""
        if self.alive:
            self.note("is gone")
            self.alive = False
            for slot in self.slots.values():
                if slot.process is not None:
                    slot.process.kill()
            self.world.network.broke(self)

    def processes(self) -> list[Process]:
        return [slot.process for slot in self.slots.values() if slot.process is not None and slot.process.alive]

    def _local(self, slot: Slot) -> LocalTask:
        live = slot.process is not None and slot.end is None
        servers = slot.process.servers if slot.process is not None else ()
        ended = slot.end is not None
        return LocalTask(
            slot.task.key, slot.task.rank, slot.task.version, servers, live, ended, slot.stopping, slot.waited
        )

    def _told(self, slot: Slot) -> TaskStatus:
        process = slot.process
        if process is None:
            return TaskStatus(key=slot.task.key, stage=TaskStage.HELD, port=slot.port)
        stage = TaskStage.READY if process.ready else TaskStage.STARTED
        return TaskStatus(
            key=slot.task.key,
            stage=stage if slot.end is None else TaskStage.ENDED,
            port=slot.port,
            step=process.step,
            saved=process.saved,
            restored=process.restored,
            near_memory_limit=process.near_memory_limit and slot.end is None,
            end=slot.end,
        )

    def _take(self, step: Action[TaskKey], order: NodeOrder) -> None:
        random, after = self.world.timeline.random, self.world.timeline.after
        if isinstance(step, Reserve):
            slot = self.slots[step.key] = Slot(_assigned(order, step.key))
            after(random.uniform(0.001, 0.05), lambda: self._hold(slot))
            return
        slot = self.slots[step.key]
        if isinstance(step, Start):
            self._start(slot, _assigned(order, step.key))
        elif isinstance(step, Release):
            del self.slots[step.key]
            after(0.0, self.look)
            self.publish()
        elif isinstance(step, WaitForPeers):
            after(1.0, lambda: self._wait_no_more(slot))
        elif isinstance(step, Stop) and step.mode is StopMode.DRAIN:
            slot.stopping = step.mode
            after(random.uniform(0.05, GRACE), lambda: self._end(slot, LEFT))
        elif isinstance(step, Stop):
            slot.stopping = StopMode.KILL
            slow = random.random() < 0.1
            after(random.uniform(0.5, 3) if slow else random.uniform(0.001, 0.1), lambda: self._end(slot, FORCED))

    def _obeys_late(self) -> bool:
        """Whether something runs here that it was told to end."""
        return any(slot.process is not None and slot.stopping is StopMode.KILL for slot in self.slots.values())

    def _hold(self, slot: Slot) -> None:
        if self.alive and self.slots.get(slot.task.key) is slot:
            place = (slot.task.role, slot.task.rank)
            taken = {one.port for one in self.slots.values() if one.end is None}
            if place not in self._ports or self._ports[place] in taken:
                self._ports[place] = self.world.fresh_port()
            slot.port = self._ports[place]
            self.publish()
            self.look()

    def _start(self, slot: Slot, task: PlannedTask) -> None:
        order = self.order
        assert order is not None
        servers = servers_of(order, task)
        address = f"{self.key.node_id}:{slot.port}"
        demand(all(servers), f"{task.key} is started before all servers are known")
        if task.role is Role.PS:
            demand(servers[task.rank] == address, f"{task.key} is not at its own address")
        self.note(f"starts {task.key} (rank {task.rank}) of version {task.version}")
        self.world.laws.started(self, task)
        process = slot.process = Process(self.world, self, task, servers, address)
        process.on_end = lambda end: self._end(slot, end)
        random = self.world.timeline.random
        process.hangs = self.world.troubled and random.random() < self.world.hanging
        if task.role is Role.PS:
            self.world.listening[address] = process
        process.begin()
        if self.world.troubled and random.random() < self.world.crashing:
            how = random.choice((FORCED, FORCED, FORCED, LEFT, TaskEnd(EndCause.MEMORY, "was killed for its memory")))
            self.world.timeline.after(random.uniform(0.01, 5), lambda: process.end(how))
        self.publish()

    def _end(self, slot: Slot, how: TaskEnd) -> None:
        if not self.alive or slot.end is not None or self.slots.get(slot.task.key) is not slot:
            return
        if slot.process is not None:
            slot.process.kill()
        self.note(f"{slot.task.key} {how.exit_text}")
        slot.end = how
        self.world.laws.ended(slot.task, how)
        if self.heard_again:
            self.stale = self.stale and self._obeys_late()
        self.look()
        self.publish()

    def _wait_no_more(self, slot: Slot) -> None:
        if self.slots.get(slot.task.key) is slot:
            slot.waited = True
            self.look()


def _assigned(order: NodeOrder, key: TaskKey) -> PlannedTask:
    return next(task for task in order.tasks if task.key == key)
