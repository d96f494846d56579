"""One connection of a node to the master: its handshake, its reports, and the queue of messages to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from dlrover_run.background import Background
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.master.job import JobHost, RequestRefused
from dlrover_run.master.jobs import OF_MASTER, Jobs
from dlrover_run.transport import auth
from dlrover_run.transport.connection import ConnectionLost, ServerConnection
from dlrover_run.transport.messages import (
    PROTOCOL,
    Ask,
    Assigned,
    Challenge,
    Hello,
    InvalidMessage,
    Join,
    MasterMessage,
    NodeMessage,
    Notice,
    Proof,
    ReadStacks,
    Refused,
    Report,
    StacksFound,
    decode_from_node,
    encode,
)
from dlrover_run.words.log_level import internal_error

JOIN_TIMEOUT = 10.0
"""Seconds from the opening of a connection until its `Join`; a slower one is ended.

A node needs two round trips. This limits how long an unauthenticated client can hold a connection.
"""

MAX_HANDSHAKE_MESSAGE = 16 * 1024
"""Maximum bytes of a message from an unauthenticated client: several times the longest valid one."""

ASK_TIMEOUT = 60.0
"""Seconds from one question of an operator's program to the next; then its connection is ended."""

LAST_MESSAGE_TIMEOUT = 5.0
"""Seconds that a node gets to read a connection's last message before the connection ends without it."""

TOKEN_REMEDY = (
    "give every node and the master the same token in DLROVER_RDZV_TOKEN, in the file that DLROVER_RDZV_TOKEN_FILE "
    "names, or by --rdzv-conf token_file=PATH"
)

Message = TypeVar("Message", bound=NodeMessage)


class NodeSession:
    """Serves one connection. Messages wait until earlier ones have been sent; of assignments only the latest waits."""

    def __init__(self, connection: ServerConnection, jobs: Jobs, token: str) -> None:
        self._connection = connection
        self._jobs = jobs
        self._token = token
        self._loop = asyncio.get_running_loop()
        self._joined: tuple[JobHost, NodeKey] | None = None
        self._replies: list[MasterMessage] = []
        self._assignment: Assignment | None = None
        self._last_message: Refused | None = None
        self._ending = False
        self._writer: asyncio.Task[None] | None = None
        self._on_refused: Callable[[str], None] = lambda reason: None
        self._background = Background(self._note_failure)
        self._ended = asyncio.Event()
        too_slow = Refused(f"the node did not join within {JOIN_TIMEOUT:g} s", retry=True)
        self._timer = self._loop.call_later(JOIN_TIMEOUT, self.end, too_slow)

    async def run(self, on_joined: Callable[[], None], on_refused: Callable[[str], None]) -> None:
        """Serve the connection until it ends. `on_joined` is called after the handshake, `on_refused` with the reason
        if the node is refused."""
        self._on_refused = on_refused
        self._background.start(self._read(on_joined, on_refused))
        try:
            await self._ended.wait()
        finally:
            self._timer.cancel()
            self._background.cancel()
            if self._joined is not None:
                job, key = self._joined
                self._jobs.disconnect(job, self, key)

    def send_assignment(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._start_writing()

    def ask_for_stacks(self, message: ReadStacks) -> None:
        if not self._ending:
            self._reply(message)

    def send_notice(self, text: str) -> None:
        if not self._ending:
            self._reply(Notice(text))

    def end(self, last_message: Refused | None) -> None:
        if self._ending:
            return
        self._ending = True
        self._last_message = last_message
        self._timer.cancel()
        self._timer = self._loop.call_later(LAST_MESSAGE_TIMEOUT, self._ended.set)
        self._start_writing()

    async def _read(self, on_joined: Callable[[], None], on_refused: Callable[[str], None]) -> None:
        try:
            hello = await self._authenticate()
            first: Join | Ask = await self._receive(Join, Ask)
            if isinstance(first, Ask):
                on_joined()
                return await self._answer(hello.job, first)
            join = first
            job = self._join(hello, join)
            on_joined()
            while True:
                message: Report | StacksFound = await self._receive(Report, StacksFound)
                if isinstance(message, StacksFound):
                    job.take_stacks(self, join.report.key, message)
                else:
                    self._jobs.receive(job, self, message.report)
        except (RequestRefused, InvalidMessage) as refusal:
            if not self._ending:
                on_refused(str(refusal))
            self.end(refusal.last_message if isinstance(refusal, RequestRefused) else Refused(str(refusal)[:2000]))
        except ConnectionLost:
            self.end(None)
        except Exception as error:
            text = self._note_defect(error)
            self.end(Refused(text, retry=True))

    async def _authenticate(self) -> Hello:
        """Authenticate in both directions. Raises RequestRefused, InvalidMessage and ConnectionLost."""
        nonce = auth.new_nonce()
        hello = await self._receive(Hello, max_bytes=MAX_HANDSHAKE_MESSAGE)
        if hello.protocol != PROTOCOL:
            raise RequestRefused(
                f"this master speaks protocol {PROTOCOL} and the node {str(hello.protocol)[:20]}: install one "
                "version of dlrover-run on all nodes"
            )
        self._reply(Challenge(nonce))
        proof = await self._receive(Proof, max_bytes=MAX_HANDSHAKE_MESSAGE)
        if not auth.macs_equal(proof.mac, auth.node_mac(self._token, hello, nonce)):
            if not self._token:
                problem = "this node has a token and the master has none"
            elif not proof.mac:
                problem = "the master requires the job's token and this node has none"
            else:
                problem = "this node's token is not the master's"
            raise RequestRefused(f"{problem}: {TOKEN_REMEDY}")
        self._reply(Proof(auth.master_mac(self._token, hello, nonce)))
        return hello

    def _join(self, hello: Hello, join: Join) -> JobHost:
        """Take the node into its job. Raises RequestRefused."""
        if join.report.key != (hello.node_id, hello.incarnation):
            raise RequestRefused("a node may only report itself, and this one sent hello under another id")
        job, welcome = self._jobs.join(hello.job, self, join)
        self._joined = job, join.report.key
        self._timer.cancel()
        self._reply(welcome)
        return job

    async def _answer(self, job: str, ask: Ask) -> None:
        """Answer the questions of an operator, who is no node, until that connection ends. Raises RequestRefused,
        InvalidMessage and ConnectionLost."""
        while True:
            self._timer.cancel()
            if ask.moved:
                self._reply(self._jobs.move(job, ask.moved))
            elif ask.stacks is None:
                self._reply(self._jobs.answer(job, ask.request))
            else:
                self._reply(await self._jobs.stacks(job, ask.stacks))
            idle = Refused(f"no question was asked for {ASK_TIMEOUT:g} s")
            self._timer = self._loop.call_later(ASK_TIMEOUT, self.end, idle)
            ask = await self._receive(Ask)

    async def _receive(self, *kinds: type[Message], max_bytes: int | None = None) -> Message:
        data = await self._connection.receive()
        # After its last message the master ignores what the node sends.
        if self._ending:
            raise ConnectionLost("the master ends it")
        if max_bytes is not None and len(data) > max_bytes:
            raise InvalidMessage(
                f"a message of {len(data)} bytes, longer than the {max_bytes} allowed before the proof"
            )
        message = decode_from_node(data)
        if not isinstance(message, kinds):
            sent, expected = type(message).__name__.lower(), kinds[0].__name__.lower()
            raise RequestRefused(f"the node sent {sent} where {expected} was expected")
        return message

    def _reply(self, message: MasterMessage) -> None:
        self._replies.append(message)
        self._start_writing()

    def _start_writing(self) -> None:
        if self._writer is None or self._writer.done():
            self._writer = self._background.start(self._write())

    async def _write(self) -> None:
        with contextlib.suppress(ConnectionLost):
            while (message := self._next_message()) is not None:
                await self._connection.send(encode(message))
        if self._ending:
            self._ended.set()

    def _note_failure(self, error: Exception) -> None:
        self._note_defect(error)
        self._ended.set()

    def _note_defect(self, error: Exception) -> str:
        text = internal_error(error, OF_MASTER)
        self._on_refused(text)
        self._jobs.log_frames(error)
        return text

    def _next_message(self) -> MasterMessage | None:
        if self._replies:
            return self._replies.pop(0)
        if self._assignment is not None and self._joined is not None:
            assignment, self._assignment = self._assignment, None
            return Assigned(assignment)
        last_message, self._last_message = self._last_message, None
        return last_message
