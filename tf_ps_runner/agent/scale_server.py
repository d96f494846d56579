"""Receives the requests of `tf-ps-run scale` on this machine for the job that this node is a part of."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable

import msgspec

from dlrover_run.operate.sockets import peer_uid
from dlrover_run.policies.parameter_servers.model import DesiredReplicas
from tf_ps_runner import scale_protocol
from tf_ps_runner.scale_protocol import ScaleReply

READ_TIMEOUT = 5.0
"""Seconds that a client has to send its request in one line; then its connection is closed."""

MAX_CONNECTIONS = 16
"""Connections at one time; with more, new ones are not served until others have ended."""


OVER = ScaleReply(granted=False, text="the job is coming to its end")
"""The answer to a request that comes too late."""


class ScaleServer:
    """Takes scale requests of this machine's user. `on_request` is called with each and returns the number of the
    request.

    `answer_up_to` gets the number of the last request that the coordinator has decided on, with its answer. It needs a
    running loop.
    """

    def __init__(self, run_id: str, on_request: Callable[[DesiredReplicas], int]) -> None:
        self._address = scale_protocol.socket_address(os.geteuid(), run_id)
        self._run_id = run_id
        self._on_request = on_request
        self._server: asyncio.Server | None = None
        self._waiting: dict[int, list[asyncio.Future[ScaleReply]]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._over = False

    async def open(self, alone: bool) -> str | None:
        """Listen; returns a sentence if that is not possible. If several nodes of a job run on one machine, the first
        of them listens for all; nodes that are `alone` in their jobs should have names of their own."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self._address)
            listener.listen(MAX_CONNECTIONS)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                return f"`tf-ps-run scale` does not reach this node: {error.strerror}"
            taken = f"another job on this machine is named {self._run_id!r} (--rdzv-id), and `tf-ps-run scale` reaches "
            return f"{taken}only that one" if alone else None
        listener.setblocking(False)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=scale_protocol.MAX_BYTES)
        return None

    def answer_up_to(self, number: int, answer: ScaleReply) -> None:
        """The coordinator has decided on all requests up to that number, each of which includes those before it."""
        for each in [each for each in self._waiting if each <= number]:
            for future in self._waiting.pop(each):
                if not future.done():
                    future.set_result(answer)

    async def close(self) -> None:
        """Stop listening, and answer waiting clients that nothing follows."""
        self._over = True
        if self._server is not None:
            self._server.close()
        for futures in self._waiting.values():
            for future in futures:
                if not future.done():
                    future.set_result(OVER)
        if self._serving:
            await asyncio.wait(self._serving)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None, "a connection has a task"
        self._serving.add(serving)
        try:
            connection = writer.get_extra_info("socket")
            if len(self._serving) <= MAX_CONNECTIONS and peer_uid(connection) == os.geteuid():
                reply = await self._answer(reader)
                if reply is not None:
                    writer.write(scale_protocol.reply_line(reply))
                    await asyncio.wait_for(writer.drain(), READ_TIMEOUT)
        except (TimeoutError, OSError, ValueError):
            # The client is gone, or does not read.
            pass
        finally:
            self._serving.discard(serving)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> ScaleReply | None:
        try:
            request = scale_protocol.read_request(await asyncio.wait_for(reader.readline(), READ_TIMEOUT))
        except (TimeoutError, msgspec.DecodeError, ValueError):
            return None
        if self._over:
            return OVER
        known: asyncio.Future[ScaleReply] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(self._on_request(request), []).append(known)
        return await known
