"""Nodes of a job with parameter servers: an agent that reconciles its tasks with its order, with `NodeState`,
`desired_tasks` and `reconcile` of the product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from support.policy_parts import order_of

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
from dlrover_run.coordination.records.plan import OVER
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.spec import JobSpec
from simulation.network import TO_MASTER, TO_NODE
from simulation.nodes import Node
from simulation.parameter_servers.tensorflow import LEFT, Process
from simulation.timeline import demand
from tf_ps_runner.agent.desired import LocalTask, desired_tasks, task_states
from tf_ps_runner.cluster.model import (
    Capacity,
    EndCause,
    PlannedTask,
    Role,
    TaskEnd,
    TaskKey,
    TaskStage,
    TaskStatus,
)
from tf_ps_runner.cluster.orders import NodeOrder
from tf_ps_runner.cluster.reports import NodeTasks
from tf_ps_runner.tf_config import servers_of

if TYPE_CHECKING:
    from simulation.parameter_servers.program import ServersProgram

FORCED = TaskEnd(EndCause.FAILURE, "was killed by SIGKILL")

GRACE = 3.0
"""Seconds after which an agent kills a task that does not leave."""

REPORT_DELAY = 0.001
"""Seconds in which changes of several tasks become one report."""


@dataclass
class Slot:
    """The state of one task in the agent."""

    task: PlannedTask
    port: int = 0
    process: Process | None = None
    end: TaskEnd | None = None
    stopping: StopMode | None = None
    waited: bool = False


class ServerNode(Node):
    """One agent with its tasks. `rooms` is its capacity by role."""

    cut = False

    def __init__(
        self, program: ServersProgram, spec: JobSpec, host: str, incarnation: str, rooms: tuple[Capacity, ...]
    ) -> None:
        self.world = program
        self.rooms = rooms
        self.order: NodeOrder | None = None
        self.slots: dict[TaskKey, Slot] = {}
        self._ports: dict[tuple[Role, int], int] = {}
        self._ends = False
        self._reporting = False
        super().__init__(program.scenario.place, spec, host, incarnation)

    @property
    def stale(self) -> bool:
        """Whether the node was declared lost, and has not yet ended the tasks of its former order."""
        return self.world.invariants.is_lost(self)

    def talks_to(self, other: ServerNode) -> bool:
        """Whether the tasks of the two nodes reach each other."""
        ways = [(node.link, way) for node in (self, other) for way in (TO_MASTER, TO_NODE)]
        return self is other or all(link.free(way) for link, way in ways)

    def order_for(self, task: PlannedTask) -> NodeOrder | None:
        """Return the order for a process, or None once its version is over."""
        order = self.order
        return order if order is not None and order.version == task.version else None

    def processes(self) -> list[Process]:
        return [slot.process for slot in self.slots.values() if slot.process is not None and slot.process.alive]

    def publish(self) -> None:
        """Report a change of a task to the coordinator, if the node is connected."""
        if not self._reporting:
            self._reporting = True
            self.call_later(REPORT_DELAY, self._report)

    def _receive(self) -> None:
        self.call_soon(self._follow)

    def _begin_to_leave(self) -> None:
        if not self._leaving:
            # The tasks of this node move to other nodes if there is room for them.
            self.call_later(self.timeline.random.uniform(0.5, 8), self._end_soon)
        super()._begin_to_leave()

    def _end_soon(self) -> None:
        self._ends = True
        self._follow()

    def _end_tasks(self) -> None:
        for slot in self.slots.values():
            if slot.process is not None:
                slot.process.kill()

    def _follow(self) -> None:
        if self.left:
            return
        wanted = self.rendezvous.assignment
        self.world.invariants.taking(self.key, wanted)
        self._state.accept(wanted)
        self.order = order_of(wanted)
        order = self.order or NodeOrder(version=0)
        ends = self._ends or wanted.phase in OVER or self.rendezvous.problem is not None
        here = tuple(self._local(slot) for slot in self.slots.values())
        for step in reconcile(desired_tasks(order, here, sparse=False), task_states(order, here), ends):
            self._take(step, order)
        if ends and not any(one.live for one in map(self._local, self.slots.values())):
            self.note(f"leaves: {self.rendezvous.problem or wanted.reason}")
            self.rendezvous.report(self._status(NodePhase.LEFT))
            self._close()
        else:
            self.publish()

    def _report(self) -> None:
        self._reporting = False
        if not self.left:
            works = NodePhase.RUNNING if self.slots else NodePhase.WAITING
            self.rendezvous.report(self._status(NodePhase.LEAVING if self._leaving else works))

    def _status(self, phase: NodePhase) -> NodeReport:
        tasks = NodeTasks(
            capacity=self.rooms, tasks=tuple(self._status_of(slot) for slot in self.slots.values() if slot.port)
        )
        return msgspec.structs.replace(self._state.report(phase), parts=(tasks,))

    def _local(self, slot: Slot) -> LocalTask:
        live = slot.process is not None and slot.end is None
        servers = slot.process.servers if slot.process is not None else ()
        ended = slot.end is not None
        return LocalTask(
            slot.task.key, slot.task.rank, slot.task.version, servers, live, ended, slot.stopping, slot.waited
        )

    def _status_of(self, slot: Slot) -> TaskStatus:
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
        random, after = self.timeline.random, self.call_later
        if isinstance(step, Reserve):
            slot = self.slots[step.key] = Slot(_assigned(order, step.key))
            after(random.uniform(0.001, 0.05), self._hold, slot)
            return
        slot = self.slots[step.key]
        if isinstance(step, Start):
            self._start(slot, _assigned(order, step.key))
        elif isinstance(step, Release):
            del self.slots[step.key]
            self.call_soon(self._follow)
        elif isinstance(step, WaitForPeers):
            after(1.0, self._wait_no_more, slot)
        elif isinstance(step, Stop) and step.mode is StopMode.DRAIN:
            slot.stopping = step.mode
            after(random.uniform(0.05, GRACE), self._end, slot, LEFT)
        elif isinstance(step, Stop):
            slot.stopping = StopMode.KILL
            slow = random.random() < 0.1
            after(random.uniform(0.5, 3) if slow else random.uniform(0.001, 0.1), self._end, slot, FORCED)

    def _hold(self, slot: Slot) -> None:
        if self.slots.get(slot.task.key) is slot:
            place = (slot.task.role, slot.task.rank)
            taken = {one.port for one in self.slots.values() if one.end is None}
            if place not in self._ports or self._ports[place] in taken:
                self._ports[place] = self.world.fresh_port()
            slot.port = self._ports[place]
            self._follow()

    def _start(self, slot: Slot, task: PlannedTask) -> None:
        order, world = self.order, self.world
        assert order is not None
        servers = servers_of(order, task)
        address = f"{self.address}:{slot.port}"
        demand(all(servers), f"{task.key} is started before all servers are known")
        if task.role is Role.PS:
            demand(servers[task.rank] == address, f"{task.key} is not at its own address")
        self.note(f"starts {task.key} (rank {task.rank}) of version {task.version}")
        world.cluster_invariants.started(self, task)
        process = slot.process = Process(world, self, task, servers, address)
        process.on_end = lambda end: self.run(lambda: self._end(slot, end))
        random = self.timeline.random
        process.hangs = random.random() < world.hanging
        if task.role is Role.PS:
            world.listening[address] = process
        process.begin()
        if random.random() < world.crashing:
            how = random.choice((FORCED, FORCED, FORCED, LEFT, TaskEnd(EndCause.MEMORY, "was killed for its memory")))
            self.timeline.after(random.uniform(0.01, 5), lambda: process.end(how))

    def _end(self, slot: Slot, how: TaskEnd) -> None:
        if slot.end is not None or self.slots.get(slot.task.key) is not slot:
            return
        if slot.process is not None:
            slot.process.kill()
        self.note(f"{slot.task.key} {how.exit_text}")
        slot.end = how
        self.call_soon(self._follow)

    def _wait_no_more(self, slot: Slot) -> None:
        if self.slots.get(slot.task.key) is slot:
            slot.waited = True
            self._follow()


def _assigned(order: NodeOrder, key: TaskKey) -> PlannedTask:
    return next(task for task in order.tasks if task.key == key)
