"""The agent's end of `protocol`: answers this machine's user about the job that the node is a part of.

The records of the protocol are imported with the first question, so that a launch does not wait for them.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from dlrover_run.background import TimeLimit
from dlrover_run.processes import unix_sockets
from dlrover_run.processes.connection_server import ConnectionServer
from dlrover_run.rendezvous.client import AskFailed

if TYPE_CHECKING:
    from dlrover_run.coordination.records.activity import NodeActivity
    from dlrover_run.coordination.records.requests import OperatorRequest
    from dlrover_run.features.operate.protocol import AgentInfo, AgentReply, AgentRequest, JobEnding, TaskProgress
    from dlrover_run.job_status.questions import StackQuery
    from dlrover_run.job_status.stacks import JobStacks
    from dlrover_run.job_status.status import JobStatus

READ_TIMEOUT = 5.0
"""Seconds that a program has to send its request, and to read the reply."""

ASK_TIMEOUT = 20.0
"""Seconds that the coordinator of the job has to answer."""

MAX_REQUEST = 16 * 1024
"""The longest line that an agent reads."""

ENDING_TIMEOUT = 1.0
"""Seconds that programs have to read of the end of the job."""

MAX_CONNECTIONS = 16
"""Connections at one time; further ones are closed."""

Ask = Callable[["OperatorRequest | None"], Awaitable["JobStatus"]]
AskStacks = Callable[["StackQuery"], Awaitable["JobStacks"]]


class AgentSocket:
    """Answers requests with what `info`, `progress`, `activity` and `recent_events` return, with the status that
    `ask` and the stacks that `ask_stacks` returns. It needs a running loop, and costs nothing without a request."""

    def __init__(
        self,
        info: Callable[[], AgentInfo],
        ask: Ask,
        progress: Callable[[], Sequence[TaskProgress]] = tuple,
        ask_stacks: AskStacks | None = None,
        activity: Callable[[], Awaitable[NodeActivity | None]] | None = None,
        recent_events: Callable[[], Sequence[bytes]] = tuple,
    ) -> None:
        self._info = info
        self._progress = progress
        self._ask = ask
        self._ask_stacks = ask_stacks
        self._activity = activity
        self._recent_events = recent_events
        self._connections = ConnectionServer(self._serve, MAX_CONNECTIONS)
        self._listener: socket.socket | None = None
        self._ending: asyncio.Future[JobEnding] | None = None
        self._watchers: set[asyncio.Task[None]] = set()

    def listen(self) -> None:
        """Take a name, under which programs find this agent. Raises OSError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(b"\0" + unix_sockets.new_socket_name().encode())
            listener.listen(MAX_CONNECTIONS)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        self._listener = listener

    async def accept(self) -> None:
        """Begin to answer."""
        if self._listener is not None:
            self._connections.server = await asyncio.start_unix_server(
                self._connections.accept, sock=self._listener, limit=MAX_REQUEST
            )

    async def finish(self, end: Callable[[], JobEnding]) -> None:
        """Answer the programs that wait for the end of the job."""
        if self._ending is not None and not self._ending.done():
            self._ending.set_result(end())
        if self._watchers:
            await asyncio.wait(self._watchers, timeout=ENDING_TIMEOUT)

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._connections.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not _may_ask(writer.get_extra_info("socket")):
            return
        try:
            async with TimeLimit(READ_TIMEOUT):
                line = await reader.readline()
            reply = await self._reply(line)
        except ValueError:
            # The line is too long, or no request.
            return
        writer.write(reply)
        async with TimeLimit(READ_TIMEOUT):
            await writer.drain()

    async def _reply(self, line: bytes) -> bytes:
        """The line that answers a line. Raises ValueError for one that is no request."""
        import msgspec

        from dlrover_run.features.operate.protocol import MAX_TASKS, AgentReply, AgentRequest
        from dlrover_run.features.registry import decode_part

        request = msgspec.json.decode(line, type=AgentRequest, dec_hook=decode_part)
        activity = await self._activity() if request.progress and self._activity is not None else None
        tasks = tuple(self._progress())[:MAX_TASKS] if request.progress else ()
        reply = AgentReply(
            agent=self._info(),
            tasks=tasks,
            memory=None if activity is None else activity.memory,
            use=None if activity is None else activity.use,
            events=tuple(map(msgspec.Raw, self._recent_events())) if request.events else (),
        )
        if request.ending:
            return msgspec.json.encode(await self._until_end(reply)) + b"\n"
        if request.waits:
            # A request to stop may end this agent before its answer is here; a reader of logs asks once more.
            self._watch()
            reply = await self._ask_coordinator(reply, request)
        return msgspec.json.encode(reply) + b"\n"

    async def _until_end(self, reply: AgentReply) -> AgentReply:
        from msgspec.structs import replace

        self._ending = self._ending or asyncio.get_running_loop().create_future()
        self._watch()
        return replace(reply, ending=await asyncio.shield(self._ending))

    def _watch(self) -> None:
        """The end of this agent waits until the program of this connection has its answer."""
        watcher = asyncio.current_task()
        assert watcher is not None, "a connection has a task"
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _ask_coordinator(self, reply: AgentReply, request: AgentRequest) -> AgentReply:
        from msgspec.structs import replace

        try:
            async with TimeLimit(ASK_TIMEOUT):
                if request.stacks is not None and self._ask_stacks is not None:
                    return replace(reply, stacks=await self._ask_stacks(request.stacks))
                return replace(reply, status=await self._ask(request.request))
        except AskFailed as failed:
            return replace(reply, problem=str(failed)[:4000], no_job=failed.no_job)
        except TimeoutError:
            problem = f"the coordinator has not answered within {ASK_TIMEOUT:g} s"
            return replace(reply, problem=problem, no_job=True)


def _may_ask(connection: socket.socket) -> bool:
    """Whether the program at the other end is of this agent's user, or of root."""
    return unix_sockets.peer_of(connection).uid in (os.geteuid(), 0)
