"""Asks the RAS threads of NCCL for a report. Asked only once workers seem to hang: each report makes all processes of
the job answer.

Each process of a job listens at the same address, and the kernel chooses one for each connection. One that is stopped
never answers, so another connection is made after a while, beside the first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from dlrover_run.background import Background, TimeLimit

RAS_TIMEOUT = 6.0
"""Seconds that all of it may take. NCCL itself waits RAS_PEER_TIMEOUT for other processes, at each of some steps from
one process to the next."""

RAS_PEER_TIMEOUT = 2
"""Seconds that NCCL waits for a process that does not answer."""

NEXT_CONNECTION = 0.3
"""Seconds without an answer to the first line after which another process is tried."""

MAX_CONNECTIONS = 8
"""Connections that are tried; with one process in two stopped, one in 256 tries meets stopped ones only."""

MAX_REPORT = 32 * 1024 * 1024
"""Bytes of a report that are read: 10 communicators of 4,096 ranks as JSON."""

MAX_LINE = 4096


class RasProblem(Exception):
    """There is no report; the text says why."""


async def read_report(address: str, timeout: float = RAS_TIMEOUT) -> str:
    """The report of the processes that listen at HOST:PORT. Raises RasProblem."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not port.isdecimal() or not host or int(port) > 65535:
        raise RasProblem(f"NCCL_RAS_ADDR={address} is no HOST:PORT")
    try:
        async with TimeLimit(timeout), _first_to_answer(host, int(port)) as (reader, writer):
            return await _report(reader, writer)
    except TimeoutError:
        raise RasProblem(f"NCCL RAS at {address} has not answered in {timeout:.0f} s") from None
    except OSError as error:
        raise RasProblem(f"nothing answers at {address} ({error.strerror or error})") from None
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
        raise RasProblem(f"what answers at {address} is not NCCL RAS") from None


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def _first_to_answer(host: str, port: int) -> AsyncIterator[Connection]:
    """The first connection on which a server has said its protocol."""
    writers: list[asyncio.StreamWriter] = []

    async def greet() -> Connection:
        reader, writer = await asyncio.open_connection(host, port, limit=MAX_LINE)
        writers.append(writer)
        writer.write(b"CLIENT PROTOCOL 2\n")
        if not (await reader.readline()).startswith(b"SERVER PROTOCOL "):
            raise ValueError("another server")
        return reader, writer

    background = Background(lambda error: None)
    try:
        yield await _race(greet, background)
    finally:
        await background.close()
        for writer in writers:
            writer.close()
            with contextlib.suppress(OSError):
                writer.transport.abort()


async def _race(greet: Callable[[], Coroutine[Any, Any, Connection]], background: Background) -> Connection:
    pending: set[asyncio.Task[Connection]] = set()
    problem: BaseException | None = None
    for number in range(MAX_CONNECTIONS):
        pending.add(background.start(greet()))
        last = number == MAX_CONNECTIONS - 1
        done, pending = await asyncio.wait(
            pending, timeout=None if last else NEXT_CONNECTION, return_when=asyncio.FIRST_COMPLETED
        )
        for one in done:
            problem = one.exception()
            if problem is None:
                return one.result()
        if not pending and problem is not None:
            break
    raise problem or TimeoutError()


async def _report(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    for command in (f"TIMEOUT {RAS_PEER_TIMEOUT}", "SET FORMAT json"):
        writer.write(f"{command}\n".encode())
        # Before 2.28.7 the second is an error, and the report is text.
        if not await reader.readline():
            raise ValueError("the connection has ended")
    writer.write(b"VERBOSE STATUS\n")
    parts: list[bytes] = []
    size = 0
    while data := await reader.read(65536):
        parts.append(data)
        size += len(data)
        if size > MAX_REPORT:
            raise ValueError("a report without end")
    return b"".join(parts).decode(errors="replace")
