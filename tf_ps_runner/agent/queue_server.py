"""Answers other nodes about the queues, on the node that hosts the chief."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from dlrover_run.coordination.bounds import MAX_PROBLEM
from dlrover_run.policies.parameter_servers.model import TaskKey
from dlrover_run.supervisor.ports import bind_everywhere
from dlrover_run.transport import auth
from tf_ps_runner.agent.protocol import MAX_LINE, Answer
from tf_ps_runner.agent.queue_words import (
    HANDSHAKE_TIMEOUT,
    PROTOCOL,
    Answered,
    Challenge,
    FromServer,
    LinkBroken,
    Membership,
    Opening,
    Passed,
    Proof,
    Refused,
    Resume,
    Welcome,
    from_caller,
    line_of,
    notice_death,
)

if TYPE_CHECKING:
    from tf_ps_runner.agent.queue_service import QueueService

AWAY_GRACE = 10.0
"""Seconds that a node may be away before what its tasks hold goes back to the queues. It mostly calls again within
one; if it comes later, its tasks are told that their parts are lost to them."""

MAX_UNAUTHENTICATED = 64
"""Connections that have not shown the token. With one more the oldest is ended."""

MOST_UNREAD = 4 * 1024 * 1024
"""Bytes that may wait for a node that does not read. With more, its connection is ended."""


class _Session:
    """A node in a version of the cluster, over all its connections."""

    def __init__(self) -> None:
        self.writer: asyncio.StreamWriter | None = None
        self.tasks: set[TaskKey] = set()
        self.answers: dict[int, Answer | None] = {}
        self.highest = -1
        self.away: asyncio.TimerHandle | None = None
        self.over = False
        self._wanted: set[int] = set()

    def resume(self, said: Resume) -> None:
        """Forget the answers that were heard, once all has been said."""
        self._wanted.update(said.wanted)
        if said.last:
            self.answers = {number: answer for number, answer in self.answers.items() if number in self._wanted}
            self._wanted = set()


class QueueServer:
    """`service` answers callers that know `key`, and only those of the version that was given to `serve`."""

    def __init__(self, service: QueueService, membership: Membership) -> None:
        self._service = service
        self._membership = membership
        self._version: int | None = None
        self._sessions: dict[str, _Session] = {}
        self._server: asyncio.Server | None = None
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._links: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self.port = 0
        self.key = auth.new_nonce()

    async def listen(self) -> int:
        """Listen at a free port of all addresses of this machine, and return it. Raises OSError."""
        listener = bind_everywhere(0)
        self.port = listener.getsockname()[1]
        self._server = await asyncio.start_server(self._meet, sock=listener, limit=MAX_LINE)
        return self.port

    def serve(self, version: int | None) -> None:
        """Answer callers of this version from now on; None for nobody. What callers of before held is forgotten."""
        if version == self._version:
            return
        self._version = version
        for session in list(self._sessions.values()):
            if session.away is not None:
                session.away.cancel()
            self._forget(session)
        for writer in self._links:
            writer.close()

    async def close(self) -> None:
        """End all connections, and listen no more."""
        self.serve(None)
        if self._server is not None:
            self._server.close()
        for writer in [*self._strangers, *self._links]:
            writer.transport.abort()
        if self._serving:
            await asyncio.wait(self._serving)

    def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._strangers) >= MAX_UNAUTHENTICATED:
            next(iter(self._strangers)).close()
        self._strangers[writer] = None
        try:
            notice_death(writer)
            session = await asyncio.wait_for(self._greet(reader, writer), HANDSHAKE_TIMEOUT)
            self._strangers.pop(writer, None)
            if session is not None:
                await self._listen_to(session, reader, writer)
        except (TimeoutError, LinkBroken, OSError):
            pass
        finally:
            self._strangers.pop(writer, None)
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Session | None:
        """The session of a caller who has shown the token; None for one that is refused."""
        opening = await from_caller(reader)
        if not isinstance(opening, Opening):
            raise LinkBroken("it did not say who it is")
        if opening.protocol != PROTOCOL or opening.job != self._membership.job:
            self._refuse(writer, f"the queues of job {self._membership.job} are here, in protocol {PROTOCOL}")
            return None
        nonce = auth.new_nonce()
        writer.write(line_of(Challenge(nonce, self._membership.server_mac(opening, nonce, self.key))))
        shown = await from_caller(reader)
        if not isinstance(shown, Proof) or not auth.macs_equal(
            shown.mac, self._membership.caller_mac(opening, nonce, self.key)
        ):
            self._refuse(writer, "it knows another token than this job's, or another key than this host's")
            return None
        if shown.version != self._version:
            self._refuse(writer, f"this node answers for version {self._version} of the cluster, not {shown.version}")
            return None
        writer.write(line_of(Welcome()))
        session = self._sessions.setdefault(shown.session, _Session())
        if session.away is not None:
            session.away.cancel()
            session.away = None
        if session.writer is not None:
            session.writer.close()
        session.writer = writer
        return session

    async def _listen_to(self, session: _Session, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._links.add(writer)
        try:
            while True:
                said = await from_caller(reader)
                if session.over or session.writer is not writer:
                    return
                self._hear(session, said)
        finally:
            self._links.discard(writer)
            if session.writer is writer:
                session.writer = None
                if not session.over:
                    session.away = asyncio.get_running_loop().call_later(AWAY_GRACE, self._forget, session)

    def _hear(self, session: _Session, said: object) -> None:
        if isinstance(said, Resume):
            session.resume(said)
        elif isinstance(said, Passed):
            for number in said.heard:
                session.answers.pop(number, None)
            self._pass(session, said)
        else:
            raise LinkBroken("it says who it is in the middle of a conversation")

    def _pass(self, session: _Session, said: Passed) -> None:
        if said.number in session.answers:
            answer = session.answers[said.number]
            if answer is not None:
                self._tell(session, Answered(said.number, answer))
            return
        if said.number <= session.highest:
            return
        session.highest = said.number
        session.answers[said.number] = None
        ask, reply = said.take or said.used, partial(self._reply, session, said.number)
        if ask is None:
            self._leave(session, said.task)
            reply(Answer())
        else:
            session.tasks.add(said.task)
            self._service.ask(said.task, ask, reply)

    def _reply(self, session: _Session, number: int, answer: Answer) -> None:
        # An answer that nobody waits for any more is not kept.
        if number in session.answers:
            session.answers[number] = answer
            self._tell(session, Answered(number, answer))

    def _leave(self, session: _Session, task: TaskKey) -> None:
        session.tasks.discard(task)
        self._service.gone(task)

    def _forget(self, session: _Session) -> None:
        """A node has stayed away, or is of another version: its tasks count as gone."""
        session.over = True
        self._sessions = {key: each for key, each in self._sessions.items() if each is not session}
        session.answers.clear()
        for task in list(session.tasks):
            self._leave(session, task)

    def _tell(self, session: _Session, message: FromServer) -> None:
        writer = session.writer
        if writer is None or writer.is_closing():
            return
        writer.write(line_of(message))
        if writer.transport.get_write_buffer_size() > MOST_UNREAD:
            writer.transport.abort()

    def _refuse(self, writer: asyncio.StreamWriter, reason: str) -> None:
        writer.write(line_of(Refused(reason[:MAX_PROBLEM])))
