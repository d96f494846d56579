"""One stream between a node and the master: its handshake, its reports, and the words that wait to be sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dlrover_run.coordination.records import Assignment, NodeKey
from dlrover_run.master.handshake import JOIN_TIMEOUT, MAX_HANDSHAKE_MESSAGE, Handshake, RequestRefused, internal_error
from dlrover_run.master.job import Job
from dlrover_run.master.jobs import Jobs
from dlrover_run.transport import auth
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
"""Seconds that a node gets to take a stream's last word before the stream ends without it."""


class NodeSession:
    """Serves one stream of gRPC. Words wait until gRPC has taken those before; of assignments only the latest waits."""

    def __init__(self, stream: Any, jobs: Jobs, token: str, grpc: ModuleType) -> None:
        self._stream = stream
        self._jobs = jobs
        self._eof = grpc.aio.EOF
        self._broken: type[Exception] = grpc.aio.BaseError
        self._loop = asyncio.get_running_loop()
        self._handshake = Handshake(token, auth.new_nonce())
        self._joined: tuple[Job, NodeKey] | None = None
        self._first: list[MasterMessage] = []
        self._wanted: Assignment | None = None
        self._last_word: Refused | None = None
        self._ending = False
        self._writer: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._timer = self._loop.call_later(JOIN_TIMEOUT, self._too_slow)

    async def run(self, on_joined: Callable[[], None], on_refused: Callable[[str], None]) -> None:
        """Serve the stream until it ends. Says when its handshake is over, and why if the node was refused."""
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
        """Say what the plan asks of the node; of what was not sent yet only the latest counts."""
        self._wanted = wanted
        self._write_soon()

    def end(self, last_word: Refused | None) -> None:
        """End the stream, after these words."""
        if self._ending:
            return
        self._ending = True
        self._last_word = last_word
        self._timer.cancel()
        self._timer = self._loop.call_later(LAST_MESSAGE_TIMEOUT, self._ended.set)
        self._write_soon()

    def _too_slow(self) -> None:
        self.end(Refused(f"the node did not join within {JOIN_TIMEOUT:g} s", retry=True))

    async def _read(self, on_joined: Callable[[], None], on_refused: Callable[[str], None]) -> None:
        try:
            job = await self._open()
            on_joined()
            while True:
                message = await self._next()
                if not isinstance(message, Report):
                    raise RequestRefused(f"the node said {type(message).__name__.lower()} where report was due")
                self._jobs.hear(job, self, message.status)
        except (RequestRefused, InvalidMessage) as refusal:
            if not self._ending:
                on_refused(str(refusal))
            self.end(refusal.last_word if isinstance(refusal, RequestRefused) else Refused(str(refusal)[:2000]))
        except (EOFError, self._broken):
            self.end(None)
        except Exception as defect:
            sentence = internal_error(defect)
            on_refused(sentence)
            self.end(Refused(sentence, retry=True))

    async def _open(self) -> Job:
        hello = self._handshake.greet(await self._next(MAX_HANDSHAKE_MESSAGE))
        self._first.append(self._handshake.challenge())
        self._write_soon()
        self._first.append(self._handshake.admit(hello, await self._next(MAX_HANDSHAKE_MESSAGE)))
        self._write_soon()
        join = self._handshake.join(hello, await self._next())
        job, welcome = self._jobs.join(hello.job, self, join)
        self._joined = job, join.status.key
        self._timer.cancel()
        self._first.append(welcome)
        self._write_soon()
        return job

    async def _next(self, most: int | None = None) -> NodeMessage:
        data = await self._stream.read()
        # What comes after the last word was said is not for us.
        if data is self._eof or self._ending:
            raise EOFError
        if most is not None and len(data) > most:
            raise InvalidMessage(f"a message of {len(data)} bytes is longer than the {most} that a stranger may say")
        return decode_from_node(data)

    def _write_soon(self) -> None:
        if self._writer is None or self._writer.done():
            self._writer = asyncio.ensure_future(self._write())

    async def _write(self) -> None:
        with contextlib.suppress(self._broken):
            while (message := self._next_word()) is not None:
                await self._stream.write(encode(message))
        if self._ending:
            self._ended.set()

    def _next_word(self) -> MasterMessage | None:
        if self._first:
            return self._first.pop(0)
        if self._wanted is not None and self._joined is not None:
            wanted, self._wanted = self._wanted, None
            return Assigned(wanted)
        last_word, self._last_word = self._last_word, None
        return last_word
