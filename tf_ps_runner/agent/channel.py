"""The agent's end of the channel to its TensorFlow processes: who connects is known, and what they say is checked.

A process is handed the address and a token of its own in its environment. Whoever connects must be of this user, as the
kernel says, and know the token of a process that is expected. The first process that greets with a token keeps it while
it is connected, for its children inherit its environment; when it connects again, the latest connection counts.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
from collections.abc import Callable
from functools import partial
from typing import Protocol

from dlrover_run.policies.parameter_servers.model import TaskKey
from tf_ps_runner.agent import words
from tf_ps_runner.agent.conversation import Conversation
from tf_ps_runner.agent.words import Answer, Ask, Event, Gone, Hello, Note, OrderMessage

HELLO_TIMEOUT = 10.0
"""Seconds after which a connection is ended that has not said whose it is; a process says so at once."""

MOST_STRANGERS = 64
"""Connections that have not said whose they are. With one more the oldest is ended."""

MOST_ASKED = 128
"""Requests of one process that may wait for their answers. With more, its connection is ended."""

ACCEPT_PAUSE = 1.0
"""Seconds until the next connection is accepted after the system had no descriptor or memory for one."""

ACCEPT_AT_ONCE = 16
"""Connections that are accepted before the loop looks at what else there is to do."""

_BACKLOG = 1024
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Clerk(Protocol):
    """Who answers the requests of the processes of this node. It is never waited for."""

    def ask(self, task: TaskKey, ask: Ask, reply: Callable[[Answer], None]) -> None:
        """Somebody asks; `reply` is called once, now or whenever it is known, or never if `gone` comes before."""

    def gone(self, task: TaskKey) -> None:
        """The connection of a task has ended; what it holds is free, and its requests need no answer any more."""


class Channel:
    """Make one, `open` it, `expect` each process before it starts, and `finish` it when it has ended.

    `on_event` is called with what each one says, `Hello` always first and `Gone` always last for each connection. To be
    used in the thread of a running loop; no call blocks.
    """

    def __init__(self, on_event: Callable[[TaskKey, Event], None], clerk: Clerk | None = None) -> None:
        self._on_event = on_event
        self._clerk = clerk
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = None
        self._tasks: dict[str, TaskKey] = {}
        self._tokens: dict[TaskKey, str] = {}
        self._talks: dict[TaskKey, Conversation] = {}
        self._known: dict[Conversation, TaskKey] = {}
        self._asked: dict[Conversation, int] = {}
        self._misunderstood: set[Conversation] = set()
        self._strangers: dict[Conversation, asyncio.TimerHandle] = {}
        self._orders: dict[TaskKey, OrderMessage] = {}
        self._pause: asyncio.TimerHandle | None = None
        # Only a process of this machine can know it, and nothing of it is left when this process ends.
        self.address = f"@tf-ps-run-{secrets.token_hex(16)}"

    def open(self) -> None:
        """Listen at `address`. Raises OSError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind("\0" + self.address[1:])
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """End all connections, with an event for each, and listen no more."""
        if self._pause is not None:
            self._pause.cancel()
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for talk in [*self._strangers, *self._known]:
            talk.close()
        self._tasks.clear()
        self._tokens.clear()
        self._orders.clear()

    def expect(self, task: TaskKey) -> str:
        """A process is about to start; the token that it is to be given, which stands in no log."""
        token = secrets.token_hex(32)
        self._tasks.pop(self._tokens.pop(task, ""), None)
        self._tasks[token], self._tokens[task] = task, token
        return token

    def tell(self, task: TaskKey, order: OrderMessage) -> None:
        """What is wanted of a task from now on: told after it has greeted, and when it is another thing than before.
        For a task that is not expected this does nothing."""
        if task not in self._tokens or self._orders.get(task) == order:
            return
        self._orders[task] = order
        talk = self._talks.get(task)
        if talk is not None:
            talk.tell(words.tell_line(order))

    def finish(self, task: TaskKey) -> None:
        """The process of a task has ended: hear its last words, with `Gone` at the end, and forget it."""
        if task not in self._talks:
            # It may have connected, spoken and ended since the loop last looked.
            self._accept(_BACKLOG)
            for stranger in list(self._strangers):
                stranger.look()
        talk = self._talks.get(task)
        if talk is not None:
            talk.finish()
        self._tasks.pop(self._tokens.pop(task, ""), None)
        self._orders.pop(task, None)

    def _accept(self, most: int = ACCEPT_AT_ONCE) -> None:
        if self._listener is None:
            return
        for _ in range(most):
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in _EXHAUSTED and self._pause is None:
                    # Else the loop would do nothing but look at it again.
                    self._loop.remove_reader(self._listener.fileno())
                    self._pause = self._loop.call_later(ACCEPT_PAUSE, self._accept_again)
                return
            self._meet(connection)

    def _accept_again(self) -> None:
        self._pause = None
        if self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _meet(self, connection: socket.socket) -> None:
        talk = Conversation(connection, self._hear, self._end)
        if talk.foreign:
            talk.close()
            return
        if len(self._strangers) >= MOST_STRANGERS:
            oldest = next(iter(self._strangers))
            # A flood of strangers may have kept us from hearing whose it is.
            oldest.look()
            if oldest in self._strangers:
                oldest.close()
        self._strangers[talk] = self._loop.call_later(HELLO_TIMEOUT, talk.close)

    def _hear(self, talk: Conversation, line: bytes) -> None:
        task = self._known.get(talk)
        try:
            said = words.read_line(line)
        except words.BadLine as bad:
            self._misunderstand(talk, task, bad)
            return
        if task is None:
            self._greet(talk, said)
        elif isinstance(said, tuple):
            self._ask(talk, task, *said)
        elif not isinstance(said, Hello):
            self._on_event(task, words.presentable(said))

    def _misunderstand(self, talk: Conversation, task: TaskKey | None, bad: words.BadLine) -> None:
        if task is None:
            talk.close()
        elif bad.ask is not None:
            talk.answer(words.answer_line(bad.ask, Answer(error=f"this cannot be asked: {bad}")))
        elif talk not in self._misunderstood:
            # It goes on, for its line is its only way to its data. One word is enough to look for the reason.
            self._misunderstood.add(talk)
            self._on_event(task, Note(f"said what its agent does not understand: {bad}"))

    def _greet(self, talk: Conversation, said: words.Said | tuple[int, Ask]) -> None:
        task = self._tasks.get(said.token) if isinstance(said, Hello) else None
        before = self._talks.get(task) if task is not None else None
        if task is None or (before is not None and before.pid != talk.pid):
            talk.close()
            return
        if before is not None:
            before.finish()
        self._strangers.pop(talk).cancel()
        self._talks[task] = talk
        self._known[talk] = task
        self._asked[talk] = 0
        self._on_event(task, Hello("", talk.pid))
        order = self._orders.get(task)
        if order is not None:
            talk.tell(words.tell_line(order))

    def _ask(self, talk: Conversation, task: TaskKey, number: int, ask: Ask) -> None:
        asked = self._asked[talk]
        if self._clerk is None:
            talk.answer(words.answer_line(number, Answer(error="this job has no queues")))
        elif asked >= MOST_ASKED:
            talk.close()
        else:
            self._asked[talk] = asked + 1
            self._clerk.ask(task, ask, partial(self._reply, talk, number))

    def _reply(self, talk: Conversation, number: int, answer: Answer) -> None:
        # Whoever is not known any more has nobody who would read it.
        if talk in self._known:
            self._asked[talk] -= 1
            talk.answer(words.answer_line(number, answer))

    def _end(self, talk: Conversation) -> None:
        timer = self._strangers.pop(talk, None)
        if timer is not None:
            timer.cancel()
        self._misunderstood.discard(talk)
        task = self._known.pop(talk, None)
        if task is None:
            return
        del self._talks[task], self._asked[talk]
        if self._clerk is not None:
            self._clerk.gone(task)
        self._on_event(task, Gone())
