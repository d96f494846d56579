"""Whether the machine of another node, or a process on it, answers. Nothing is sent."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import socket

from dlrover_run.background import TimeLimit
from dlrover_run.transport.addresses import UnresolvedHost, resolve


class Reach(enum.Enum):
    """What a connection to a port of another machine came to."""

    ACCEPTS = "accepts"
    REFUSES = "refuses"
    SILENT = "silent"


async def probe(host: str, port: int, timeout: float) -> Reach:
    """Whether a process listens at an address. No answer within `timeout` seconds, or no route, is silence."""
    with contextlib.suppress(UnresolvedHost, TimeoutError):
        async with TimeLimit(timeout):
            for address in await resolve(host, port):
                with socket.socket(address.family, socket.SOCK_STREAM) as connection:
                    connection.setblocking(False)
                    try:
                        await asyncio.get_running_loop().sock_connect(connection, (address.host, address.port))
                    except OSError as error:
                        if error.errno in (errno.ECONNREFUSED, errno.ECONNRESET):
                            return Reach.REFUSES
                        continue
                    return Reach.ACCEPTS
    return Reach.SILENT
