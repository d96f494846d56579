"""The connections of an agent to its TensorFlow processes: each message is checked, and each request answered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dlrover_run.processes.line_connection import LineConnection
from dlrover_run.processes.line_listener import LineListener
from tf_ps_runner.agent import protocol
from tf_ps_runner.agent.protocol import Answer, Disconnected, Note, OrderMessage, ProcessHello, Request, TaskEvent
from tf_ps_runner.agent.queue_service import Queues
from tf_ps_runner.cluster.model import TaskKey

MAX_PENDING_REQUESTS = 128
"""Requests of one process that may wait for their answers. With more, its connection is closed."""


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
        self._listener: LineListener[TaskKey] = LineListener("tf-ps-run", protocol.MAX_LINE, self)
        self._pending: dict[LineConnection, int] = {}
        self._malformed: set[TaskKey] = set()
        self.address = self._listener.address
        self.open = self._listener.open
        self.close = self._listener.close
        self.expect = self._listener.expect
        self.finish = self._listener.finish

    def send_order(self, task: TaskKey, order: OrderMessage) -> None:
        """The order for a task from now on: sent after its hello, and when it has changed. For a task that is not
        expected this does nothing."""
        self._listener.send_latest(task, protocol.encode_line(order))

    def token_of(self, line: bytes) -> str:
        """The token in a hello; see `LineHandler`."""
        try:
            message = protocol.read_line(line)
        except protocol.ProtocolError:
            return ""
        return message.token if isinstance(message, ProcessHello) else ""

    def begin(self, task: TaskKey, connection: LineConnection, hello: bytes) -> None:
        """A process has connected."""
        self._pending[connection] = 0
        self._malformed.discard(task)
        self._on_event(task, ProcessHello("", connection.pid))

    def line(self, task: TaskKey, connection: LineConnection, line: bytes) -> None:
        """Take a message or a request of a process."""
        try:
            message = protocol.read_line(line)
        except protocol.ProtocolError as bad:
            self._on_malformed(task, connection, bad)
            return
        if isinstance(message, tuple):
            self._on_request(task, connection, *message)
        elif not isinstance(message, ProcessHello):
            self._on_event(task, protocol.sanitize(message))

    def end(self, task: TaskKey, connection: LineConnection) -> None:
        """The connection of a process has ended."""
        del self._pending[connection]
        self._queues.gone(task)
        self._on_event(task, Disconnected())

    def _on_malformed(self, task: TaskKey, connection: LineConnection, bad: protocol.ProtocolError) -> None:
        if bad.request is not None:
            connection.answer(protocol.answer_line(bad.request, Answer(error=f"invalid request: {bad}")))
        elif task not in self._malformed:
            # The connection stays, because it is the process's only way to its data. One note is enough to look for the
            # reason.
            self._malformed.add(task)
            self._on_event(task, Note(f"sent an invalid message: {bad}"))

    def _on_request(self, task: TaskKey, connection: LineConnection, number: int, ask: Request) -> None:
        if self._pending[connection] >= MAX_PENDING_REQUESTS:
            connection.close()
        else:
            self._pending[connection] += 1
            self._queues.ask(task, ask, partial(self._reply, connection, number))

    def _reply(self, connection: LineConnection, number: int, answer: Answer) -> None:
        # A connection that is not known any more has no reader.
        if connection in self._pending:
            self._pending[connection] -= 1
            connection.answer(protocol.answer_line(number, answer))
