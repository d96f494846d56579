"""The data queues of a job, in the agent on the chief's node."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tf_ps_runner.agent.protocol import Answer, Request, Rollback, Snapshot, Take, Used
from tf_ps_runner.agent.queue_server import Membership, QueueServer
from tf_ps_runner.cluster.model import Role, TaskKey
from tf_ps_runner.cluster.orders import NodeOrder
from tf_ps_runner.data.queue import QueueError, ShardQueues, StateError, finished_waiters

Reply = Callable[[Answer], None]

_DONE = Answer()
_OVER = Answer(over=True)


@dataclass(frozen=True)
class _PendingTake:
    task: TaskKey
    take: Take
    reply: Reply


class QueueService:
    """The queues, and the tasks that wait for a part. Requests are answered at once, or, if there is no part now, as
    soon as there is one or all is over. A reply may end a connection, so `gone` may be called within a call."""

    def __init__(self) -> None:
        self._queues: ShardQueues[TaskKey] = ShardQueues()
        # In the order in which they came, for each name of a queue.
        self._waiting: dict[str, deque[_PendingTake]] = {}

    def ask(self, task: TaskKey, ask: Request, reply: Reply) -> None:
        """Answer a request; `reply` is called once, unless `gone` comes before."""
        try:
            if isinstance(ask, Take):
                self._queues.open(ask.queue, ask.spec)
                self._waiting.setdefault(ask.queue, deque()).append(_PendingTake(task, ask, reply))
            elif isinstance(ask, Used):
                self._queues.use(task, ask.queue, ask.shard, ask.next)
                reply(_DONE)
            elif isinstance(ask, Snapshot):
                reply(Answer(state=self._queues.snapshot()))
            elif isinstance(ask, Rollback):
                self._queues.roll_back(ask.state)
                reply(_DONE)
            self._answer_waiting()
        except QueueError as error:
            reply(Answer(error=str(error), lost=error.lost))
        except StateError as error:
            reply(Answer(error=f"the state of the queues cannot be restored: {error}"))

    def gone(self, task: TaskKey) -> None:
        """A task has ended: its parts go back to the queues."""
        for name, waiting in self._waiting.items():
            self._waiting[name] = deque(each for each in waiting if each.task != task)
        self._queues.give_back(task)
        self._answer_waiting()

    def reset(self) -> None:
        """All servers and tasks are new. Until a chief reports which state belongs to its model, everything counts as
        unused: what is used again is not lost."""
        self._waiting.clear()
        self._queues.roll_back(None)

    def _answer_waiting(self) -> None:
        for name in list(self._waiting):
            self._give(name)
            self._dismiss(name)
            if not self._waiting.get(name, True):
                del self._waiting[name]

    def _give(self, name: str) -> None:
        # Looked up anew each time, because a reply may have changed it.
        while waiting := self._waiting.get(name):
            first = waiting[0]
            try:
                part = self._queues.take(first.task, name, first.take.spec)
            except QueueError as error:
                waiting.popleft()
                first.reply(Answer(error=str(error), lost=error.lost))
                continue
            if part is None:
                return
            waiting.popleft()
            first.reply(Answer(shard=part.number, begin=part.begin, end=part.end, epoch=part.epoch))

    def _dismiss(self, name: str) -> None:
        """Answer that all is over to the tasks that need not wait for parts that may come back."""
        queue, waiting = self._queues.named(name), self._waiting.get(name)
        if queue is None or not waiting or not queue.all_given:
            return
        tasks = [each.task for each in waiting]
        chief = next((task for task in tasks if task.role is Role.CHIEF), None)
        finished = finished_waiters(queue.holders, tasks, chief)
        self._waiting[name] = deque(each for each in waiting if each.task not in finished)
        for each in waiting:
            if each.task in finished:
                each.reply(_OVER)


class Queues:
    """Answers the requests of this node's processes for data.

    If the chief is on this node, the queues are here, and are served to processes of other nodes as well. Else a
    process gets the address of the queues, and a token, and asks there. `membership` is None in a job of one node.
    `follow` has to be called with each order before any task of it starts.
    """

    def __init__(self, membership: Membership | None = None) -> None:
        self.service = QueueService()
        self.version = 0
        self._membership = membership
        self._server: QueueServer | None = None
        if membership is not None:
            self._server = QueueServer(self.service.ask, self.service.gone, membership)
        self._versions: dict[TaskKey, int] = {}
        self._here = False
        self._elsewhere = ("", "")
        # Requests that came before it was known where the queues are.
        self._early: list[tuple[TaskKey, Request, Reply]] = []

    @property
    def key(self) -> str:
        """The secret that other nodes have to know, drawn anew by each node; empty in a job of one node."""
        return self._server.key if self._server is not None else ""

    @property
    def port(self) -> int:
        """The port for processes of other nodes; 0 before `listen`, and in a job of one node."""
        return self._server.port if self._server is not None else 0

    async def listen(self) -> None:
        """Listen for processes of other nodes, which are answered while the chief is here. Raises OSError."""
        if self._server is not None:
            await self._server.listen()

    async def close(self) -> None:
        """Answer no process of another node any more."""
        if self._server is not None:
            self._server.close()

    def follow(self, order: NodeOrder) -> None:
        """Which tasks there are, and where the chief is. An order of an earlier version changes nothing: a node that
        has nothing to host any more may still be asked by others."""
        if order.version < self.version:
            return
        if order.version != self.version:
            self.version = order.version
            self._here = False
            self._versions = {key: version for key, version in self._versions.items() if version >= order.version}
            self.service.reset()
        self._versions.update((task.key, task.version) for task in order.tasks)
        chief_here = any(task.role is Role.CHIEF and task.version == order.version for task in order.tasks)
        # A chief that has succeeded may not be in the order any more, and workers go on with its queues.
        self._here = chief_here or (self._here and not order.queue_endpoint)
        self._elsewhere = ("", "") if self._here else (order.queue_endpoint, order.queue_key)
        if self._server is not None:
            self._server.serve(self.version if self._here else None)
        early, self._early = self._early, []
        for waiting in early:
            self.ask(*waiting)

    def ask(self, task: TaskKey, ask: Request, reply: Reply) -> None:
        """Answer a process: `reply` is called once, now or later, unless `gone` comes before."""
        endpoint, key = self._elsewhere
        if self._versions.get(task) != self.version:
            # What it would use goes into a model that is given up.
            reply(Answer(error="this process belongs to servers that are not used any more", lost=True))
        elif isinstance(ask, Snapshot | Rollback) and task.role is not Role.CHIEF:
            reply(Answer(error="only the chief has to do with the state of the queues"))
        elif self._here:
            self.service.ask(task, ask, reply)
        elif self._membership is None:
            reply(Answer(error="this job has no chief that its queues could be with"))
        elif endpoint:
            reply(Answer(queue=self._membership.access(task, self.version, endpoint, key)))
        else:
            self._early.append((task, ask, reply))

    def gone(self, task: TaskKey) -> None:
        """A process of this node has ended: its parts go back, and its requests need no answer."""
        self.service.gone(task)
        self._early = [waiting for waiting in self._early if waiting[0] != task]
