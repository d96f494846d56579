"""The data queues of a job, in the agent on the chief's node."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dlrover_run.policies.parameter_servers.model import NodeOrder, Role, TaskKey
from tf_ps_runner.agent.protocol import Answer, Request, Rollback, Snapshot, Take, Used
from tf_ps_runner.agent.queue_caller import QueueCaller
from tf_ps_runner.agent.queue_server import QueueServer
from tf_ps_runner.agent.queue_words import Membership
from tf_ps_runner.data.queue import QueueError, ShardQueues, finished_waiters
from tf_ps_runner.data.state import StateError

Reply = Callable[[Answer], None]

_DONE = Answer()
_OVER = Answer(over=True)


@dataclass(frozen=True)
class _Waiting:
    task: TaskKey
    take: Take
    reply: Reply


class QueueService:
    """The queues, and who waits for a part. A reply may end a connection, so that `gone` is called within a call."""

    def __init__(self) -> None:
        self._queues: ShardQueues[TaskKey] = ShardQueues()
        # In the order in which they came, for each name of a queue.
        self._waiting: dict[str, deque[_Waiting]] = {}

    def ask(self, task: TaskKey, ask: Request, reply: Reply) -> None:
        """Somebody asks; `reply` is called once, unless `gone` comes before."""
        try:
            if isinstance(ask, Take):
                self._take(_Waiting(task, ask, reply))
            elif isinstance(ask, Used):
                self._queues.use(task, ask.queue, ask.shard, ask.next)
                reply(_DONE)
                self._settle()
            elif isinstance(ask, Snapshot):
                reply(Answer(state=self._queues.snapshot()))
            elif isinstance(ask, Rollback):
                self._queues.roll_back(ask.state)
                reply(_DONE)
                self._settle()
        except QueueError as error:
            reply(Answer(error=str(error), lost=error.lost))
        except StateError as error:
            reply(Answer(error=f"the state of the queues cannot be gone back to: {error}"))

    def gone(self, task: TaskKey) -> None:
        """A task has ended: what it holds goes back to the queues."""
        for name, waiting in self._waiting.items():
            self._waiting[name] = deque(each for each in waiting if each.task != task)
        self._queues.give_back(task)
        self._settle()

    def reset(self) -> None:
        """The servers are new, and so are all tasks. Until a chief tells which state belongs to its model, everything
        counts as unused: what is used again is not lost."""
        self._waiting.clear()
        self._queues.roll_back(None)

    def _take(self, waiting: _Waiting) -> None:
        part = self._queues.take(waiting.task, waiting.take.queue, waiting.take.spec)
        if part is None:
            self._waiting.setdefault(waiting.take.queue, deque()).append(waiting)
            self._dismiss(waiting.take.queue)
        else:
            waiting.reply(Answer(shard=part.number, begin=part.begin, end=part.end, epoch=part.epoch))

    def _settle(self) -> None:
        """Give those who wait what there is now."""
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
        """Tell those that all is over who need not wait for what may come back."""
        queue, waiting = self._queues.named(name), self._waiting.get(name)
        if queue is None or not waiting or not queue.all_given:
            return
        tasks = [each.task for each in waiting]
        chief = next((task for task in tasks if task.role is Role.CHIEF), None)
        told = finished_waiters(queue.holders, tasks, chief)
        self._waiting[name] = deque(each for each in waiting if each.task not in told)
        for each in waiting:
            if each.task in told:
                each.reply(_OVER)


class Queues:
    """Answers the requests of this node's processes (a `RequestHandler` of their channel), by itself if the chief is
    here.

    `membership` shows other nodes that this one belongs to the job, None in a job of one node; `say` tells the person
    what keeps this node from its data. `follow` is called with each order before any task of it starts.
    """

    def __init__(
        self, membership: Membership | None = None, say: Callable[[str], None] = lambda sentence: None
    ) -> None:
        self.service = QueueService()
        self.version = 0
        self._caller = QueueCaller(membership, say) if membership is not None else None
        self._server = QueueServer(self.service, membership) if membership is not None else None
        self._versions: dict[TaskKey, int] = {}
        self._here = False

    @property
    def key(self) -> str:
        """What other nodes have to know to be answered; empty in a job of one node."""
        return self._server.key if self._server is not None else ""

    @property
    def port(self) -> int:
        """Where other nodes can ask, while this one hosts the chief; 0 before `listen`, and in a job of one node."""
        return self._server.port if self._server is not None else 0

    async def listen(self) -> None:
        """Answer other nodes whenever the chief is here. Raises OSError."""
        if self._server is not None:
            await self._server.listen()

    async def close(self) -> None:
        """Answer nobody and call nobody any more."""
        if self._caller is not None:
            await self._caller.close()
        if self._server is not None:
            await self._server.close()

    @property
    def here(self) -> bool:
        """Whether this node answers for the queues."""
        return self._here

    def follow(self, order: NodeOrder) -> None:
        """Which tasks there are, and where the chief is. An order of a version that is over changes nothing: whoever
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
        if self._server is not None:
            self._server.serve(self.version if self._here else None)
        if self._caller is not None:
            self._caller.follow("" if self._here else order.queue_endpoint, order.version, order.queue_key)

    def ask(self, task: TaskKey, ask: Request, reply: Reply) -> None:
        """A process asks; `reply` is called once, unless `gone` comes before."""
        if self._versions.get(task) != self.version:
            # What it would use goes into a model that nobody goes on with.
            reply(Answer(error="this process belongs to servers that are not used any more", lost=True))
        elif isinstance(ask, Snapshot | Rollback) and task.role is not Role.CHIEF:
            reply(Answer(error="only the chief has to do with the state of the queues"))
        elif self._here:
            self.service.ask(task, ask, reply)
        elif self._caller is not None:
            self._caller.ask(task, ask, reply)
        else:
            reply(Answer(error="this job has no chief that its queues could be with"))

    def gone(self, task: TaskKey) -> None:
        """A process has ended: what it holds goes back."""
        self.service.gone(task)
        if self._caller is not None:
            self._caller.gone(task)
