"""Where the queues of a job are answered for: on the node that hosts the chief, by its agent.

Requests are answered at once or, when there is no part to give just now, as soon as there is one or all is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dlrover_run.policies.parameter_servers.model import Role, TaskKey
from tf_ps_runner.agent.words import Answer, Ask, Rollback, Snapshot, Take, Used
from tf_ps_runner.data.queue import QueueError, ShardQueues
from tf_ps_runner.data.state import StateError
from tf_ps_runner.data.tail import dismissed

Reply = Callable[[Answer], None]

_DONE = Answer()
_OVER = Answer(over=True)


@dataclass(frozen=True)
class _Waiting:
    task: TaskKey
    take: Take
    reply: Reply


class Desk:
    """The queues, and who waits for a part. A reply may end a connection, so that `gone` is called within a call."""

    def __init__(self) -> None:
        self._queues: ShardQueues[TaskKey] = ShardQueues()
        # In the order in which they came, for each name of a queue.
        self._waiting: dict[str, deque[_Waiting]] = {}

    def ask(self, task: TaskKey, ask: Ask, reply: Reply) -> None:
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

    def begin_again(self) -> None:
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
        told = dismissed(queue.holders, tasks, chief)
        self._waiting[name] = deque(each for each in waiting if each.task not in told)
        for each in waiting:
            if each.task in told:
                each.reply(_OVER)
