"""What tests of a job with parameter servers share: a node with a real board that hosts tasks which are pretended.

It does what an agent does: it holds a port for each new task, starts it once the addresses are known, says that it is
ready, and ends whatever its order does not name.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from harness import WAIT
from policy_parts import order_of

from dlrover_run.coordination.model import OVER, Assignment, NodePhase, NodeReport
from dlrover_run.coordination.rules import JobRules
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
from dlrover_run.policies.parameter_servers.rules import ClusterRules
from dlrover_run.rendezvous.backends import open_client
from dlrover_run.spec import Entrypoint, JobSpec

KILLED = TaskEnd(EndCause.FAILURE, "was killed by SIGKILL")
SUCCESS = TaskEnd(EndCause.SUCCESS, "has succeeded")

CHIEF = TaskKey(Role.CHIEF, 0)


def ps(number: int) -> TaskKey:
    return TaskKey(Role.PS, number)


def worker(number: int) -> TaskKey:
    return TaskKey(Role.WORKER, number)


def rules(**changes: Any) -> JobRules:
    """One server or two, and a worker beside the chief; nobody waits for what the test knows."""
    return JobRules(
        policy=ClusterRules(min_ps=1, max_ps=2, min_workers=0, max_workers=1, **changes),
        max_nodes=8,
        lost_after=0.2,
        last_call_timeout=0.1,
        keep_alive_interval=0.3,
    )


def room(**tasks: int) -> tuple[Capacity, ...]:
    """Rooms by role: `room(ps=1, chief=1)`."""
    return tuple(Capacity(Role(role), number) for role, number in tasks.items())


ports = itertools.count(20_000)


class PretendNode:
    """One node of the job. With `trains` it is a node of dlrover-run, which hosts nothing."""

    def __init__(
        self,
        spec: JobSpec,
        name: str,
        rooms: tuple[Capacity, ...] = (),
        wish: DesiredReplicas | None = None,
        trains: bool = False,
    ) -> None:
        self.name = name
        self.said: list[str] = []
        self.tasks: dict[TaskKey, TaskStatus] = {}
        self.begun: list[TaskKey] = []
        self._trains = trains
        self._rooms, self._wish = rooms, wish
        self._news = asyncio.Event()
        self._leaving = False
        self._ports: dict[tuple[Role, int], int] = {}
        self.board = open_client(spec, self._news.set, self._say)
        self._acted = asyncio.Event()
        self._acting = asyncio.ensure_future(self._act_on_news())

    @property
    def assignment(self) -> Assignment:
        return self.board.assignment

    @property
    def order(self) -> NodeOrder:
        """What it shall run; AssertionError when there is nothing."""
        assert order_of(self.assignment) is not None, self.assignment
        return order_of(self.assignment)

    @property
    def keys(self) -> set[str]:
        """The tasks that run here, by name."""
        return {str(key) for key, told in self.tasks.items() if told.stage is not TaskStage.ENDED}

    def end(self, key: TaskKey, end: TaskEnd = KILLED) -> None:
        """One of its tasks ends."""
        self.tasks[key] = msgspec.structs.replace(self.tasks[key], stage=TaskStage.ENDED, end=end)
        self._news.set()

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait until something of this node is so."""

        async def see() -> None:
            while not holds():
                self._acted.clear()
                await self._acted.wait()

        try:
            await asyncio.wait_for(see(), WAIT)
        except TimeoutError:
            raise AssertionError(
                f"{self.name}: in vain; {self.board.problem}; {self.said}; {self.assignment}; {self.tasks}"
            ) from None

    async def runs(self, *names: str, opened: bool = True) -> None:
        """Wait until these tasks run here and no others, and workers are let in."""
        await self.until(lambda: self.keys == set(names) and (self.order.open or not opened))

    async def over(self) -> Assignment:
        """Wait for the end of the job."""
        await self.until(lambda: self.assignment.phase in OVER or self.board.problem is not None)
        return self.assignment

    async def close(self) -> None:
        """Leave the job."""
        self._leaving = True
        self._publish()
        self._acting.cancel()
        await asyncio.wait([self._acting])
        await self.board.close()

    def _say(self, line: str) -> None:
        self.said.append(line)
        self._news.set()

    async def _act_on_news(self) -> None:
        while True:
            self._act()
            self._acted.set()
            await self._news.wait()
            self._news.clear()

    def _act(self) -> None:
        order = order_of(self.assignment)
        wanted = {task.key: task for task in order.tasks} if order is not None else {}
        if self.assignment.phase in OVER:
            wanted = {}
        self.tasks = {key: told for key, told in self.tasks.items() if key in wanted}
        for key, task in wanted.items():
            assert order is not None
            self.tasks[key] = self._follow(order, task, self.tasks.get(key))
        self._publish()

    def _follow(self, order: NodeOrder, task: PlannedTask, told: TaskStatus | None) -> TaskStatus:
        if told is None:
            port = self._ports.setdefault((task.role, task.rank), next(ports))
            return TaskStatus(key=task.key, stage=TaskStage.HELD, port=port)
        servers = order.servers if task.version <= order.version else order.next_servers
        if told.stage is TaskStage.HELD and task.port and servers and all(servers):
            self.begun.append(task.key)
            told = msgspec.structs.replace(told, stage=TaskStage.STARTED)
        may = task.role is not Role.WORKER or order.open
        if told.stage is TaskStage.STARTED and may:
            told = msgspec.structs.replace(told, stage=TaskStage.READY, restored=0 if task.role is Role.CHIEF else -1)
        if told.stage is TaskStage.READY:
            if (order.pause and task.role is Role.WORKER) or (order.save and task.role is Role.CHIEF):
                left = TaskEnd(EndCause.RESHAPED, "left, as it was asked to")
                return msgspec.structs.replace(told, stage=TaskStage.ENDED, end=left)
            if order.ending and task.role is Role.WORKER:
                return msgspec.structs.replace(told, stage=TaskStage.ENDED, end=SUCCESS)
        return told

    def _publish(self) -> None:
        wanted = self.assignment
        works = bool(self.tasks)
        self.board.report(
            NodeReport(
                node_id=self.name,
                incarnation=f"{self.name}-1",
                host=f"host-{self.name}",
                address="127.0.0.1",
                port=0,
                workers=1,
                phase=NodePhase.LEFT if self._leaving else NodePhase.RUNNING if works else NodePhase.WAITING,
                known_round=wanted.key,
                epoch=wanted.epoch,
                policy=None if self._trains else self._hosting(),
            )
        )

    def _hosting(self) -> NodeTasks:
        number = 1 if self._wish else 0
        return NodeTasks(
            capacity=self._rooms,
            tasks=tuple(self.tasks.values()),
            scale_request=self._wish,
            scale_request_number=number,
        )


class Job:
    """Nodes that are started with one spec, and closed at the end."""

    def __init__(self, rules: JobRules, **meeting: Any) -> None:
        self.spec = JobSpec(
            entrypoint=Entrypoint("script", "train.py"),
            run_id="job",
            rules=rules,
            local_addr="127.0.0.1",
            **meeting,
        )
        self.nodes: list[PretendNode] = []

    def node(
        self, name: str, rooms: tuple[Capacity, ...] = (), spec: JobSpec | None = None, **more: Any
    ) -> PretendNode:
        node = PretendNode(spec or self.spec, name, rooms, **more)
        self.nodes.append(node)
        return node

    def visitor(self, **wish: int) -> PretendNode:
        """Somebody who wishes for something, and goes."""
        return self.node("visitor", wish=DesiredReplicas(**wish))


@asynccontextmanager
async def playing(rules: JobRules, **meeting: Any) -> AsyncIterator[Job]:
    """A job whose nodes meet as `meeting` says."""
    job = Job(rules, **meeting)
    try:
        yield job
    finally:
        for node in job.nodes:
            await node.close()
