"""The agent's end of `protocol`: answers this machine's user about the job that the node is a part of.

The records of the protocol are imported with the first question, so that a launch does not wait for them.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from dlrover_run.operate import sockets
from dlrover_run.rendezvous.client import AskFailed

if TYPE_CHECKING:
    from dlrover_run.coordination.requests import OperatorRequest
    from dlrover_run.coordination.status import JobStatus
    from dlrover_run.operate.protocol import AgentInfo, Reply, TaskProgress

READ_TIMEOUT = 5.0
"""Seconds that a program has to send its question, and to read the answer."""

ASK_TIMEOUT = 20.0
"""Seconds that the coordinator of the job has to answer."""

MAX_CONNECTIONS = 16
"""Connections at one time; further ones are closed."""

Ask = Callable[["OperatorRequest | None"], Awaitable["JobStatus"]]


class AgentSocket:
    """Answers questions with what `info` and `progress` return, and with the status that `ask` returns. It needs a
    running loop, and costs nothing while no question comes."""

    def __init__(
        self,
        info: Callable[[], AgentInfo],
        ask: Ask,
        progress: Callable[[], Sequence[TaskProgress]] = tuple,
    ) -> None:
        self._info = info
        self._progress = progress
        self._ask = ask
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listen. Raises OSError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(b"\0" + sockets.new_socket_name().encode())
            listener.listen(MAX_CONNECTIONS)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=sockets.MAX_QUESTION)

    def close(self) -> None:
        """Stop listening, and end all connections."""
        if self._server is not None:
            self._server.close()
        for serving in self._serving:
            serving.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None, "a connection has a task"
        self._serving.add(serving)
        try:
            own = sockets.peer_uid(writer.get_extra_info("socket")) in (os.geteuid(), 0)
            if own and len(self._serving) <= MAX_CONNECTIONS:
                reply = await self._reply(await asyncio.wait_for(reader.readline(), READ_TIMEOUT))
                writer.write(reply)
                await asyncio.wait_for(writer.drain(), READ_TIMEOUT)
        except (TimeoutError, OSError, ValueError):
            # The program is gone, or does not read, or its line is no question.
            pass
        except asyncio.CancelledError:
            # By `close`. The server of asyncio would report it as an error of the connection.
            pass
        finally:
            self._serving.discard(serving)
            writer.close()

    async def _reply(self, line: bytes) -> bytes:
        """The line that answers a line. Raises ValueError for one that is no question."""
        import msgspec

        from dlrover_run.operate.protocol import MAX_TASKS, Question, Reply

        question = msgspec.json.decode(line, type=Question)
        tasks = tuple(self._progress())[:MAX_TASKS] if question.progress else ()
        reply = Reply(agent=self._info(), tasks=tasks)
        if question.status or question.request is not None:
            reply = await self._ask_coordinator(reply, question.request)
        return msgspec.json.encode(reply) + b"\n"

    async def _ask_coordinator(self, reply: Reply, request: OperatorRequest | None) -> Reply:
        from msgspec.structs import replace

        try:
            async with asyncio.timeout(ASK_TIMEOUT):
                return replace(reply, status=await self._ask(request))
        except AskFailed as failed:
            return replace(reply, problem=str(failed)[:4000], no_job=failed.no_job)
        except TimeoutError:
            return replace(reply, problem=f"the coordinator has not answered within {ASK_TIMEOUT:g} s")
