"""Detects that a worker of a round whose workers may outlive it forms its group without a block of `Survivor`.

Such a worker has no line to its agent: it waits for the others at the store of the round, where they will not come. So
the agent of rank 0 looks there for it. Either rank 0 itself listens, or rank 0 has a block and hosts no store, and then
the agent listens in its place until it is known how the group forms.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any

from dlrover_run.supervisor.ports import bind_everywhere, until_listens

LISTEN_INTERVAL = 0.5
"""Seconds between two attempts to connect to rank 0."""

FIRST_BYTES_TIMEOUT = 5.0
"""Seconds for the first bytes of a client, which it sends at once."""

MAX_CLIENTS = 16
"""Connections that are looked at at a time."""

STORE_CLIENT = struct.pack("<BI", 0, 0x3C85F7CE)
"""How a client of torch's store begins: the query VALIDATE, and its number (TCPStoreBackend.hpp). A connection that
begins otherwise is that of a program which scans ports."""


class PlainScriptProbe:
    """Looks at the store of one round at a time. `on_found` is called with the name of a worker, until `stop`. To be
    used in the thread of a running loop."""

    def __init__(self, on_found: Callable[[str], None]) -> None:
        self._on_found = on_found
        self._loop = asyncio.get_running_loop()
        self._watched: tuple[int, bool] | None = None
        self._listener: socket.socket | None = None
        self._searches: set[asyncio.Task[str | None]] = set()

    def watch(self, port: int, has_block: bool) -> None:
        """Look at the port of the store. `has_block` says whether rank 0, a worker of this node, has connected to its
        agent. Idempotent."""
        if self._watched == (port, has_block):
            return
        self.stop()
        self._watched = (port, has_block)
        if not has_block:
            self._begin(_rank_0_listens(port))
            return
        # If another process has taken the port, no client finds a store there.
        with contextlib.suppress(OSError):
            self._listener = listener = bind_everywhere(port)
            listener.listen(MAX_CLIENTS)
            listener.setblocking(False)
            self._loop.add_reader(listener, self._accept, listener)

    def stop(self) -> None:
        """Look no more, and leave the port to rank 0. Idempotent."""
        self._watched = None
        for search in self._searches:
            search.cancel()
        self._searches.clear()
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, address = listener.accept()
            if len(self._searches) == MAX_CLIENTS:
                # Clients try again, and of the workers without a block one is enough.
                connection.close()
                return
            search = self._begin(_begins_as_client(connection, address[0]))
            search.add_done_callback(lambda _: connection.close())

    def _begin(self, search: Coroutine[Any, Any, str | None]) -> asyncio.Task[str | None]:
        task = self._loop.create_task(search)
        self._searches.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, search: asyncio.Task[str | None]) -> None:
        if search not in self._searches:
            return
        self._searches.discard(search)
        if (worker := search.result()) is not None:
            self._on_found(worker)


async def _rank_0_listens(port: int) -> str:
    await until_listens(socket.AF_INET, ("127.0.0.1", port), LISTEN_INTERVAL)
    return "rank 0"


async def _begins_as_client(connection: socket.socket, address: str) -> str | None:
    connection.setblocking(False)
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(FIRST_BYTES_TIMEOUT):
            if await asyncio.get_running_loop().sock_recv(connection, len(STORE_CLIENT)) == STORE_CLIENT:
                return f"a worker at {address.removeprefix('::ffff:')}"
    return None
