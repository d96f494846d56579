"""The master's socket: each stream of gRPC becomes a `Session` between a node and its job."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlrover_run.master.connections import MAX_STRANGERS, Connections, most_connections
from dlrover_run.master.jobs import Jobs
from dlrover_run.master.session import Session
from dlrover_run.wire.messages import METHOD, Refused
from dlrover_run.wire.transport import SERVER_OPTIONS, load_grpc

MOST_CONNECTIONS_OPTION = "grpc.max_allowed_incoming_connections"
"""Beyond that many connections gRPC closes a new one at once."""

STOP_TIMEOUT = 3.0
"""Seconds that streams and connections get to end when the master does; what is left then is cut."""

REFUSALS_INTERVAL = 10.0
"""The least number of seconds between two lines about refused strangers, so that they cannot fill a log."""


class MasterServer:
    """Serves the one method of the master. `say` prints one line for the person who runs it.

    `on_change` is called when a node came or went or a job was forgotten. `report` has lines about jobs that are for
    whoever started the master.
    """

    def __init__(
        self,
        token: str,
        state_dir: Path | None,
        say: Callable[[str], None],
        on_change: Callable[[], None] = lambda: None,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._token = token
        self._say = say
        self.grpc = load_grpc()
        self.jobs = Jobs(state_dir, int(time.time() * 1000), say, on_change, report)
        self._sessions: set[Session] = set()
        self._strangers: set[Session] = set()
        self._refusals = 0
        self._refusals_told = -REFUSALS_INTERVAL
        most = most_connections()
        self._connections = Connections(most)
        self._server = self.grpc.aio.server(options=[*SERVER_OPTIONS, (MOST_CONNECTIONS_OPTION, most)])
        service, _, method = METHOD.strip("/").partition("/")
        handler = self.grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers((self.grpc.method_handlers_generic_handler(service, {method: handler}),))

    async def start(self, address: str, tls: Any = None) -> int:
        """Listen on HOST:PORT, with gRPC's server credentials for TLS; returns the port. Raises OSError."""
        try:
            if tls is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, tls)
        except RuntimeError as error:
            raise OSError(str(error)) from None
        if not port:
            raise OSError(f"cannot listen on {address}")
        await self._server.start()
        self._connections.watch(int(port))
        return int(port)

    async def stop(self, reason: str) -> None:
        """End every stream with these words, and stop listening, within STOP_TIMEOUT seconds."""
        self._connections.close()
        self.jobs.close(reason)
        for session in list(self._sessions):
            session.end(Refused(reason, retry=True))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._server.stop(STOP_TIMEOUT / 2), STOP_TIMEOUT)

    def _note_refusal(self, peer: str, reason: str) -> None:
        """Say that a stream was refused, and of many in a short time only how many there were."""
        self._refusals += 1
        now = asyncio.get_running_loop().time()
        if now < self._refusals_told + REFUSALS_INTERVAL:
            return
        others = f" ({self._refusals - 1} others before it)" if self._refusals > 1 else ""
        self._refusals, self._refusals_told = 0, now
        self._say(f"refused {peer}: {reason}{others}")

    async def _serve(self, _requests: Any, stream: Any) -> None:
        session = Session(stream, self.jobs, self._token, self.grpc)
        if len(self._strangers) >= MAX_STRANGERS:
            session.end(Refused("too many nodes are in their handshake with this master", retry=True))
        self._sessions.add(session)
        self._strangers.add(session)
        peer = stream.peer()

        def note_joined() -> None:
            self._strangers.discard(session)
            self._connections.joined(peer)

        try:
            await session.run(note_joined, lambda reason: self._note_refusal(peer, reason))
        finally:
            self._sessions.discard(session)
            if session not in self._strangers:
                self._connections.left(peer)
            self._strangers.discard(session)
