"""One connection of a node to the master: its handshake, its reports, and the queue of messages to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from dlrover_run.coordination.model import Assignment, NodeKey
from dlrover_run.master.handshake import JOIN_TIMEOUT, MAX_HANDSHAKE_MESSAGE, Handshake, RequestRefused, internal_error
from dlrover_run.master.job import Job
from dlrover_run.master.jobs import Jobs
from dlrover_run.transport import auth
from dlrover_run.transport.connection import ConnectionLost, ServerConnection
from dlrover_run.transport.messages import (
    Assigned,
    InvalidMessage,
    MasterMessage,
    NodeMessage,
    Refused,
    Report,
    decode_from_node,
    encode,
)

LAST_MESSAGE_TIMEOUT = 5.0
"""Seconds that a node gets to read a connection's last message before the connection ends without it."""


class NodeSession:
    """Serves one connection. Messages wait until earlier ones have been sent; of assignments only the latest waits."""

    def __init__(self, connection: ServerConnection, jobs: Jobs, token: str) -> None:
        self._connection = connection
        self._jobs = jobs
        self._loop = asyncio.get_running_loop()
        self._handshake = Handshake(token, auth.new_nonce())
        self._joined: tuple[Job, NodeKey] | None = None
        self._replies: list[MasterMessage] = []
        self._assignment: Assignment | None = None
        self._last_message: Refused | None = None
        self._ending = False
        self._writer: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._timer = self._loop.call_later(JOIN_TIMEOUT, self._note_slow_join)

    async def run(self, on_joined: Callable[[], None], on_refused: Callable[[str], None]) -> None:
        """Serve the connection until it ends. `on_joined` is called after the handshake, `on_refused` with the reason
        if the node is refused."""
        reader = asyncio.ensure_future(self._read(on_joined, on_refused))
        try:
            await self._ended.wait()
        finally:
            self._timer.cancel()
            reader.cancel()
            if self._writer is not None:
                self._writer.cancel()
            if self._joined is not None:
                job, key = self._joined
                self._jobs.part(job, self, key)

    def tell(self, wanted: Assignment) -> None:
        """Send an assignment; it replaces one that has not been sent yet."""
        self._assignment = wanted
        self._start_writing()

    def end(self, last_word: Refused | None) -> None:
        """End the connection after this message."""
        if self._ending:
            return
        self._ending = True
        self._last_message = last_word
        self._timer.cancel()
        self._timer = self._loop.call_later(LAST_MESSAGE_TIMEOUT, self._ended.set)
        self._start_writing()

    def _note_slow_join(self) -> None:
        self.end(Refused(f"the node did not join within {JOIN_TIMEOUT:g} s", retry=True))

    async def _read(self, on_joined: Callable[[], None], on_refused: Callable[[str], None]) -> None:
        try:
            job = await self._open()
            on_joined()
            while True:
                message = await self._receive()
                if not isinstance(message, Report):
                    raise RequestRefused(f"the node sent {type(message).__name__.lower()} where report was expected")
                self._jobs.hear(job, self, message.status)
        except (RequestRefused, InvalidMessage) as refusal:
            if not self._ending:
                on_refused(str(refusal))
            last = refusal.last_word if isinstance(refusal, RequestRefused) else Refused(str(refusal)[:2000])
            self.end(last)
        except ConnectionLost:
            self.end(None)
        except Exception as defect:
            text = internal_error(defect)
            on_refused(text)
            self.end(Refused(text, retry=True))

    async def _open(self) -> Job:
        hello = self._handshake.greet(await self._receive(MAX_HANDSHAKE_MESSAGE))
        self._reply(self._handshake.challenge())
        self._reply(self._handshake.admit(hello, await self._receive(MAX_HANDSHAKE_MESSAGE)))
        join = self._handshake.join(hello, await self._receive())
        job, welcome = self._jobs.join(hello.job, self, join)
        self._joined = job, join.status.key
        self._timer.cancel()
        self._reply(welcome)
        return job

    async def _receive(self, max_bytes: int | None = None) -> NodeMessage:
        data = await self._connection.receive()
        # After its last message the master ignores what the node sends.
        if self._ending:
            raise ConnectionLost("the master ends it")
        if max_bytes is not None and len(data) > max_bytes:
            raise InvalidMessage(
                f"a message of {len(data)} bytes, longer than the {max_bytes} allowed before the proof"
            )
        return decode_from_node(data)

    def _reply(self, message: MasterMessage) -> None:
        self._replies.append(message)
        self._start_writing()

    def _start_writing(self) -> None:
        if self._writer is None or self._writer.done():
            self._writer = asyncio.ensure_future(self._write())

    async def _write(self) -> None:
        with contextlib.suppress(ConnectionLost):
            while (message := self._next_message()) is not None:
                await self._connection.send(encode(message))
        if self._ending:
            self._ended.set()

    def _next_message(self) -> MasterMessage | None:
        if self._replies:
            return self._replies.pop(0)
        if self._assignment is not None and self._joined is not None:
            assignment, self._assignment = self._assignment, None
            return Assigned(assignment)
        last_message, self._last_message = self._last_message, None
        return last_message
