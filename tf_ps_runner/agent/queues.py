"""The queues of the data as the processes of this node see them, wherever they are answered for."""

from __future__ import annotations

from typing import Protocol

from dlrover_run.coordination.cluster.records import Order, Role, TaskKey
from tf_ps_runner.agent.desk import Desk, Reply
from tf_ps_runner.agent.words import Answer, Ask, Rollback, Snapshot


class Elsewhere(Protocol):
    """The way to the node that hosts the chief."""

    def follow(self, place: str, version: int) -> None:
        """Where the queues of that version are answered for, HOST:PORT; empty while that is not known."""

    def ask(self, task: TaskKey, ask: Ask, reply: Reply) -> None:
        """As `Desk.ask`."""

    def gone(self, task: TaskKey) -> None:
        """As `Desk.gone`."""


class Queues:
    """Answers the requests of this node's processes (a `Clerk` of their channel), by itself where the chief is here.

    `elsewhere` is the way to another node, None in a job of one node. `follow` is called with each order before any
    task of it starts.
    """

    def __init__(self, elsewhere: Elsewhere | None = None) -> None:
        self.desk = Desk()
        self.version = 0
        self._elsewhere = elsewhere
        self._versions: dict[TaskKey, int] = {}
        self._here = False

    @property
    def here(self) -> bool:
        """Whether this node answers for the queues."""
        return self._here

    def follow(self, order: Order) -> None:
        """Which tasks there are, and where the chief is."""
        if order.version != self.version:
            self.version = order.version
            self._here = False
            self._versions = {key: version for key, version in self._versions.items() if version >= order.version}
            self.desk.begin_again()
        self._versions.update((task.key, task.version) for task in order.tasks)
        chief_here = any(task.role is Role.CHIEF and task.version == order.version for task in order.tasks)
        # A chief that has succeeded may not be in the order any more, and workers go on with its queues.
        self._here = chief_here or (self._here and not order.queue_at)
        if self._elsewhere is not None:
            self._elsewhere.follow("" if self._here else order.queue_at, order.version)

    def ask(self, task: TaskKey, ask: Ask, reply: Reply) -> None:
        """A process asks; `reply` is called once, unless `gone` comes before."""
        if self._versions.get(task) != self.version:
            # What it would use goes into a model that nobody goes on with.
            reply(Answer(error="this process belongs to servers that are not used any more", lost=True))
        elif isinstance(ask, Snapshot | Rollback) and task.role is not Role.CHIEF:
            reply(Answer(error="only the chief has to do with the state of the queues"))
        elif self._here:
            self.desk.ask(task, ask, reply)
        elif self._elsewhere is not None:
            self._elsewhere.ask(task, ask, reply)
        else:
            reply(Answer(error="this job has no chief that its queues could be with"))

    def gone(self, task: TaskKey) -> None:
        """A process has ended: what it holds goes back."""
        self.desk.gone(task)
        if self._elsewhere is not None:
            self._elsewhere.gone(task)
