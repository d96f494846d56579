"""The connections of a small server: their number is limited, and all of them end with the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from dlrover_run.background import TimeLimit

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

CLOSE_TIMEOUT = 5.0
"""Seconds that a peer has to take what was sent to it. Then the connection is reset, so that it takes no slot."""


class ConnectionServer:
    """Calls `serve` for each connection; beyond `limit` they are closed at once. `accept` is the callback of the
    functions of asyncio that start a server, whose result belongs in `server`. An exception of `serve` that is none of
    the connection goes on to the event loop, which reports it; the connection is closed in any case."""

    def __init__(self, serve: Serve, limit: int) -> None:
        self.server: asyncio.Server | None = None
        self._serve = serve
        self._limit = limit
        self._serving: set[asyncio.Task[None]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None, "a connection has a task"
        self._serving.add(serving)
        try:
            if len(self._serving) <= self._limit:
                await self._serve(reader, writer)
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            # The peer is gone or too slow, or what it sends is too long.
            pass
        except asyncio.CancelledError:
            # By `close`. The server of asyncio would report it as an error of the connection.
            pass
        finally:
            # Whatever ended it, it must not count as open for ever: `limit` of those would close the server.
            try:
                await _close(writer)
            finally:
                self._serving.discard(serving)

    def close(self) -> None:
        """Stop listening, and end all connections."""
        if self.server is not None:
            self.server.close()
        for serving in self._serving:
            serving.cancel()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    # A connection that broke has an error, which the loop reports if it is collected without having been awaited.
    with contextlib.suppress(OSError, asyncio.CancelledError):
        try:
            async with TimeLimit(CLOSE_TIMEOUT):
                await writer.wait_closed()
        except TimeoutError:
            writer.transport.abort()
