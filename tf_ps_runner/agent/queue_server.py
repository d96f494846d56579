"""Serves the data queues to processes of other nodes, on the node that hosts the chief.

The lines are those of a process and its agent (`protocol`), after a handshake: `QueueHello`, a challenge, `QueueProof`,
and a welcome or a refusal. A process sends each request that is not answered again over its next connection. A number
of its own makes that safe: the request is carried out once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from dlrover_run.background import TimeLimit
from dlrover_run.processes.connection_server import ConnectionServer
from dlrover_run.processes.ports import bind_everywhere
from dlrover_run.transport import auth
from tf_ps_runner.agent import protocol
from tf_ps_runner.agent.protocol import (
    MAX_LINE,
    Answer,
    Challenge,
    ProtocolError,
    QueueAccess,
    QueueHello,
    QueueProof,
    QueueRequest,
    Refused,
    Request,
    Welcome,
)
from tf_ps_runner.cluster.model import TaskKey
from tf_ps_runner.data.access import PROTOCOL, break_when_dead, prove, task_token

Ask = Callable[[TaskKey, Request, Callable[[Answer], None]], None]

HANDSHAKE_TIMEOUT = 10.0
"""Seconds for a process to prove what it is; then its connection is closed."""

ENDED_GRACE = 1.0
"""Seconds from the end of a connection until the parts of its process go back to the queues. A process that ends closes
its connection; one that lives, behind a proxy that was restarted, connects again within a fraction of that."""

BROKEN_GRACE = 10.0
"""The same where the connection broke, as when its network failed. A process that connects later learns that its parts
are lost to it."""

MAX_CONNECTIONS = 10_000
"""Connections at one time, which is more than a job has processes; further ones are closed."""

MAX_UNAUTHENTICATED = 64
"""Connections that have not proved what they are. With one more the oldest is closed."""

MAX_PENDING = 128
"""Requests of a process that may wait for their answers. With more, its connection is closed."""

MAX_UNREAD_BYTES = 4 * 1024 * 1024
"""Bytes that may wait for a process that does not read. With more, its connection is closed."""


@dataclass(frozen=True)
class Membership:
    """The job that this node belongs to, and the job's token, empty for none."""

    job: str
    token: str = field(default="", repr=False)

    def token_of(self, task: TaskKey, version: int, key: str) -> str:
        """The token of a task in a version, for the queues of that key."""
        return task_token(self.token, key, self.job, version, task.role.value, task.id)

    def access(self, task: TaskKey, version: int, endpoint: str, key: str) -> QueueAccess:
        """What a process of this node needs to reach the queues there."""
        return QueueAccess(
            endpoint=endpoint,
            job=self.job,
            version=version,
            role=task.role.value,
            id=task.id,
            token=self.token_of(task, version, key),
        )


class _Session:
    """A process, over all its connections. `answers` are those that it may not have received; None while it waits."""

    def __init__(self, task: TaskKey, number: str) -> None:
        self.task = task
        self.id = number
        self.writer: asyncio.StreamWriter | None = None
        self.answers: dict[int, Answer | None] = {}
        self.oldest = 0
        self.away: asyncio.TimerHandle | None = None
        self.over = False


class QueueServer:
    """Passes the requests of other nodes' processes to `ask`, and calls `gone` when one of them is gone.

    Only processes of the version that was given to `serve` are answered.
    """

    def __init__(self, ask: Ask, gone: Callable[[TaskKey], None], membership: Membership) -> None:
        self._ask = ask
        self._gone = gone
        self._membership = membership
        self._version: int | None = None
        self._sessions: dict[TaskKey, _Session] = {}
        self._connections = ConnectionServer(self._serve, MAX_CONNECTIONS)
        self._unauthenticated: dict[asyncio.StreamWriter, None] = {}
        self.port = 0
        self.key = auth.new_nonce()

    async def listen(self) -> int:
        """Listen at a free port of all addresses of this machine, and return it. Raises OSError."""
        listener = bind_everywhere(0)
        self.port = listener.getsockname()[1]
        self._connections.server = await asyncio.start_server(self._connections.accept, sock=listener, limit=MAX_LINE)
        return self.port

    def serve(self, version: int | None) -> None:
        """Answer processes of this version from now on; None for no process. All former sessions are forgotten."""
        if version != self._version:
            self._version = version
            for session in list(self._sessions.values()):
                self._forget(session)

    def close(self) -> None:
        """End all connections, and listen no more."""
        self.serve(None)
        self._connections.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
            # Not left to its coroutine, which runs later: each of many that come at once would close this one.
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            oldest.close()
        self._unauthenticated[writer] = None
        with contextlib.suppress(ProtocolError):
            try:
                break_when_dead(writer.get_extra_info("socket"))
                async with TimeLimit(HANDSHAKE_TIMEOUT):
                    session = await self._authenticate(reader, writer)
            finally:
                self._unauthenticated.pop(writer, None)
            if session is not None:
                await self._serve_session(session, reader, writer)

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Session | None:
        """The session of a process that has proved what it is; None for one that is refused."""
        hello = protocol.read_queue_line(await reader.readuntil())
        if not isinstance(hello, QueueHello):
            raise ProtocolError("it did not introduce itself")
        if hello.protocol != PROTOCOL or hello.job != self._membership.job:
            reason = f"the queues of the job {self._membership.job} are here, in protocol {PROTOCOL}"
            writer.write(protocol.encode_line(Refused(reason)))
            return None
        nonce = auth.new_nonce()
        writer.write(protocol.encode_line(Challenge(nonce)))
        shown = protocol.read_queue_line(await reader.readuntil())
        task = TaskKey(hello.role, hello.id)
        token = self._membership.token_of(task, hello.version, self.key)
        expected = prove(token, "process", hello.nonce, nonce)
        if not isinstance(shown, QueueProof) or not auth.macs_equal(shown.mac, expected):
            writer.write(
                protocol.encode_line(Refused("this process has another token than this job's, or another key"))
            )
            return None
        if hello.version != self._version:
            reason = f"this node serves version {self._version} of the cluster, not {hello.version}"
            writer.write(protocol.encode_line(Refused(reason)))
            return None
        writer.write(protocol.encode_line(Welcome(prove(token, "queues", hello.nonce, nonce))))
        return self._session(task, hello.session, writer)

    def _session(self, task: TaskKey, number: str, writer: asyncio.StreamWriter) -> _Session:
        session = self._sessions.get(task)
        if session is not None and session.id != number:
            self._forget(session)
            session = None
        if session is None:
            session = self._sessions[task] = _Session(task, number)
        if session.away is not None:
            session.away.cancel()
            session.away = None
        if session.writer is not None:
            session.writer.close()
        session.writer = writer
        return session

    async def _serve_session(
        self, session: _Session, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        grace = BROKEN_GRACE
        try:
            while True:
                line = protocol.read_queue_line(await reader.readuntil())
                if session.over or session.writer is not writer:
                    return
                if not isinstance(line, QueueRequest):
                    raise ProtocolError("it introduces itself in the middle of a connection")
                self._on_request(session, line)
        except asyncio.IncompleteReadError:
            grace = BROKEN_GRACE if writer.is_closing() else ENDED_GRACE
        finally:
            if session.writer is writer:
                session.writer = None
                if not session.over:
                    session.away = asyncio.get_running_loop().call_later(grace, self._forget, session)

    def _on_request(self, session: _Session, request: QueueRequest) -> None:
        session.oldest = max(session.oldest, request.oldest)
        session.answers = {number: answer for number, answer in session.answers.items() if number >= session.oldest}
        if request.number < session.oldest:
            # The process has its answer: this copy was on its way in an older connection.
            return
        if request.number in session.answers:
            answer = session.answers[request.number]
            if answer is not None:
                self._send(session, request.number, answer)
            return
        if len(session.answers) >= MAX_PENDING:
            raise ProtocolError("it asks for more than it reads")
        session.answers[request.number] = None
        self._ask(session.task, request.ask, partial(self._reply, session, request.number))

    def _reply(self, session: _Session, number: int, answer: Answer) -> None:
        # An answer that is not awaited any more is not kept.
        if number in session.answers:
            session.answers[number] = answer
            self._send(session, number, answer)

    def _forget(self, session: _Session) -> None:
        """The process has stayed away, or is of another version: it counts as gone."""
        if session.over:
            return
        session.over = True
        session.answers.clear()
        if session.away is not None:
            session.away.cancel()
        if session.writer is not None:
            session.writer.close()
        if self._sessions.get(session.task) is session:
            del self._sessions[session.task]
        self._gone(session.task)

    def _send(self, session: _Session, number: int, answer: Answer) -> None:
        writer = session.writer
        if writer is None or writer.is_closing():
            return
        writer.write(protocol.answer_line(number, answer))
        if writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            writer.transport.abort()
