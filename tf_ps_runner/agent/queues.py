"""The queues of the data as the processes of this node see them, wherever they are answered for."""

from __future__ import annotations

from collections.abc import Callable

from dlrover_run.policies.parameter_servers.model import NodeOrder, Role, TaskKey
from tf_ps_runner.agent.desk import Desk, Reply
from tf_ps_runner.agent.queue_caller import QueueCaller
from tf_ps_runner.agent.queue_server import QueueServer
from tf_ps_runner.agent.queue_words import Membership
from tf_ps_runner.agent.words import Answer, Ask, Rollback, Snapshot


class Queues:
    """Answers the requests of this node's processes (a `Clerk` of their channel), by itself where the chief is here.

    `membership` shows other nodes that this one belongs to the job, None in a job of one node; `say` tells the person
    what keeps this node from its data. `follow` is called with each order before any task of it starts.
    """

    def __init__(
        self, membership: Membership | None = None, say: Callable[[str], None] = lambda sentence: None
    ) -> None:
        self.desk = Desk()
        self.version = 0
        self._caller = QueueCaller(membership, say) if membership is not None else None
        self._server = QueueServer(self.desk, membership) if membership is not None else None
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
            self.desk.begin_again()
        self._versions.update((task.key, task.version) for task in order.tasks)
        chief_here = any(task.role is Role.CHIEF and task.version == order.version for task in order.tasks)
        # A chief that has succeeded may not be in the order any more, and workers go on with its queues.
        self._here = chief_here or (self._here and not order.queue_endpoint)
        if self._server is not None:
            self._server.serve(self.version if self._here else None)
        if self._caller is not None:
            self._caller.follow("" if self._here else order.queue_endpoint, order.version, order.queue_key)

    def ask(self, task: TaskKey, ask: Ask, reply: Reply) -> None:
        """A process asks; `reply` is called once, unless `gone` comes before."""
        if self._versions.get(task) != self.version:
            # What it would use goes into a model that nobody goes on with.
            reply(Answer(error="this process belongs to servers that are not used any more", lost=True))
        elif isinstance(ask, Snapshot | Rollback) and task.role is not Role.CHIEF:
            reply(Answer(error="only the chief has to do with the state of the queues"))
        elif self._here:
            self.desk.ask(task, ask, reply)
        elif self._caller is not None:
            self._caller.ask(task, ask, reply)
        else:
            reply(Answer(error="this job has no chief that its queues could be with"))

    def gone(self, task: TaskKey) -> None:
        """A process has ended: what it holds goes back."""
        self.desk.gone(task)
        if self._caller is not None:
            self._caller.gone(task)
