"""The agent's end of the connections to its TensorFlow processes: each is authenticated, and each message is checked.

A process gets the address and a token of its own in its environment. The peer must be a process of this user, as the
kernel reports it, and present the token of an expected task. The first process that presents a token keeps it while it
is connected, because its children inherit its environment; when it connects again, the latest connection counts.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dlrover_run.policies.parameter_servers.model import TaskKey
from tf_ps_runner.agent import protocol
from tf_ps_runner.agent.connection import LineConnection
from tf_ps_runner.agent.protocol import Answer, Disconnected, Note, OrderMessage, ProcessHello, Request, TaskEvent
from tf_ps_runner.agent.queue_service import Queues

HELLO_TIMEOUT = 10.0
"""Seconds until a connection is closed that has not sent its hello; a process does that at once."""

MAX_UNAUTHENTICATED = 64
"""Connections without a hello. With one more the oldest is closed."""

MAX_PENDING_REQUESTS = 128
"""Requests of one process that may wait for their answers. With more, its connection is closed."""

ACCEPT_PAUSE = 1.0
"""Seconds until the next connection is accepted after the system had no descriptor or memory for one."""

ACCEPT_AT_ONCE = 16
"""Connections that are accepted in one turn of the loop."""

_BACKLOG = 1024
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass
class _Process:
    """An expected process. `malformed` means that an invalid message of it was reported."""

    key: TaskKey
    token: str
    order: OrderMessage | None = None
    connection: LineConnection | None = None
    pending: int = 0
    malformed: bool = False


class TaskChannel:
    """The connections of all tasks of a node: `open`, `expect` each process before it starts, and `finish` it when it
    has ended.

    `on_event` is called with each message of a process, and `queues` answer its requests. For each connection
    `ProcessHello` always comes first and `Disconnected` always last. To be used in the thread of a running loop; no
    call blocks.
    """

    def __init__(self, on_event: Callable[[TaskKey, TaskEvent], None], queues: Queues) -> None:
        self._on_event = on_event
        self._queues = queues
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = None
        self._processes: dict[TaskKey, _Process] = {}
        self._authenticated: dict[LineConnection, _Process] = {}
        self._unauthenticated: dict[LineConnection, asyncio.TimerHandle] = {}
        self._pause: asyncio.TimerHandle | None = None
        # An abstract name: reachable on this machine only, and nothing of it is left when this process ends.
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
        """Close all connections, with an event for each, and stop listening."""
        if self._pause is not None:
            self._pause.cancel()
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for connection in [*self._unauthenticated, *self._authenticated]:
            connection.close()
        self._processes.clear()

    def expect(self, task: TaskKey) -> str:
        """A process is about to start; returns the token that it is to be given, which appears in no log."""
        token = secrets.token_hex(32)
        self._processes.setdefault(task, _Process(task, token)).token = token
        return token

    def send_order(self, task: TaskKey, order: OrderMessage) -> None:
        """The order for a task from now on: sent after its hello, and when it has changed. For a task that is not
        expected this does nothing."""
        process = self._processes.get(task)
        if process is None or process.order == order:
            return
        process.order = order
        if process.connection is not None:
            process.connection.send_line(protocol.encode_line(order))

    def finish(self, task: TaskKey) -> None:
        """The process of a task has ended: read its last messages, with `Disconnected` at the end, and forget it."""
        process = self._processes.get(task)
        if process is None:
            return
        if process.connection is None:
            # It may have connected, sent messages and ended since the last turn of the loop.
            self._accept(_BACKLOG)
            for stranger in list(self._unauthenticated):
                stranger.read()
        if process.connection is not None:
            process.connection.finish()
        del self._processes[task]

    def _accept(self, most: int = ACCEPT_AT_ONCE) -> None:
        if self._listener is None:
            return
        for _ in range(most):
            try:
                accepted, _ = self._listener.accept()
            except OSError as error:
                if error.errno in _EXHAUSTED and self._pause is None:
                    # Else the loop would be busy with nothing but this listener.
                    self._loop.remove_reader(self._listener.fileno())
                    self._pause = self._loop.call_later(ACCEPT_PAUSE, self._accept_again)
                return
            self._on_connect(accepted)

    def _accept_again(self) -> None:
        self._pause = None
        if self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _on_connect(self, accepted: socket.socket) -> None:
        connection = LineConnection(accepted, self._on_line, self._on_end)
        if connection.other_user:
            connection.close()
            return
        if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
            oldest = next(iter(self._unauthenticated))
            # A flood of connections may have kept its hello from being read.
            oldest.read()
            if oldest in self._unauthenticated:
                oldest.close()
        self._unauthenticated[connection] = self._loop.call_later(HELLO_TIMEOUT, connection.close)

    def _on_line(self, connection: LineConnection, line: bytes) -> None:
        process = self._authenticated.get(connection)
        try:
            message = protocol.read_line(line)
        except protocol.ProtocolError as bad:
            self._on_malformed(connection, process, bad)
            return
        if process is None:
            self._authenticate(connection, message)
        elif isinstance(message, tuple):
            self._on_request(connection, process, *message)
        elif not isinstance(message, ProcessHello):
            self._on_event(process.key, protocol.sanitize(message))

    def _on_malformed(self, connection: LineConnection, process: _Process | None, bad: protocol.ProtocolError) -> None:
        if process is None:
            connection.close()
        elif bad.request is not None:
            connection.answer(protocol.answer_line(bad.request, Answer(error=f"invalid request: {bad}")))
        elif not process.malformed:
            # The connection stays, because it is the process's only way to its data. One note is enough to look for the
            # reason.
            process.malformed = True
            self._on_event(process.key, Note(f"sent an invalid message: {bad}"))

    def _authenticate(self, connection: LineConnection, message: protocol.TaskMessage | tuple[int, Request]) -> None:
        token = message.token if isinstance(message, ProcessHello) else ""
        process = next((each for each in self._processes.values() if each.token == token), None)
        before = process.connection if process is not None else None
        if process is None or (before is not None and before.pid != connection.pid):
            connection.close()
            return
        if before is not None:
            before.finish()
        self._unauthenticated.pop(connection).cancel()
        self._authenticated[connection] = process
        process.connection, process.pending, process.malformed = connection, 0, False
        self._on_event(process.key, ProcessHello("", connection.pid))
        if process.order is not None:
            connection.send_line(protocol.encode_line(process.order))

    def _on_request(self, connection: LineConnection, process: _Process, number: int, ask: Request) -> None:
        if process.pending >= MAX_PENDING_REQUESTS:
            connection.close()
        else:
            process.pending += 1
            self._queues.ask(process.key, ask, partial(self._reply, connection, number))

    def _reply(self, connection: LineConnection, number: int, answer: Answer) -> None:
        # A connection that is not known any more has no reader.
        if (process := self._authenticated.get(connection)) is not None:
            process.pending -= 1
            connection.answer(protocol.answer_line(number, answer))

    def _on_end(self, connection: LineConnection) -> None:
        if (timer := self._unauthenticated.pop(connection, None)) is not None:
            timer.cancel()
        if (process := self._authenticated.pop(connection, None)) is not None:
            process.connection = None
            self._queues.gone(process.key)
            self._on_event(process.key, Disconnected())
