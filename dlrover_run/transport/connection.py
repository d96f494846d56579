"""Connections between a node and the master: messages as bytes, in order, until one side ends the connection.

gRPC is one implementation. The simulation has another one, so it runs the real client and the real master.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol

from dlrover_run.rendezvous import kinds
from dlrover_run.transport import auth, grpc_errors, grpc_setup, messages
from dlrover_run.transport.addresses import Address
from dlrover_run.transport.grpc_errors import ConnectionProblem, ServerKind
from dlrover_run.words.text import join_address

MASTER = ServerKind("a master", "master", "tls_ca", "tls_ca", "tls_cert", "tls_key")


class ConnectionLost(Exception):
    """The connection has ended or was never established; the message is the reason, a clause."""


class ServerConnection(Protocol):
    """The master's side of a connection."""

    async def send(self, data: bytes) -> None: ...

    async def receive(self) -> bytes:
        """The node's next message. Raises ConnectionLost."""


class Connection(Protocol):
    """A node's side of a connection."""

    async def send(self, data: bytes) -> None:
        """Send a message. On a connection that has ended this does nothing: `receive` reports the end."""

    async def receive(self) -> bytes:
        """The master's next message. Raises ConnectionLost."""

    async def finish(self) -> None:
        """Send nothing more. The master ends the connection once it has read all earlier messages."""

    async def close(self) -> None:
        """Close the connection. Messages that the master has not read yet are lost."""


class Connect(Protocol):
    """Opens a connection to the master at addresses of one family. Raises ConnectionLost."""

    def __call__(self, spec: kinds.Master, addresses: Sequence[Address]) -> Connection: ...


class GrpcConnection:
    """A node's side, as one stream of gRPC on a channel of its own. Raises ConnectionLost for an unreadable TLS
    file."""

    def __init__(self, spec: kinds.Master, addresses: Sequence[Address]) -> None:
        grpc = grpc_setup.load_grpc()
        self._failed: type[Exception] = grpc.aio.AioRpcError
        self._encrypted = spec.tls is not None
        authority = join_address(spec.host, spec.port)
        try:
            self._channel = grpc_setup.open_channel(addresses, authority, spec.tls, grpc_setup.CHANNEL_OPTIONS)
        except auth.TlsFileError as error:
            raise ConnectionLost(str(error)) from None
        self._stream = self._channel.stream_stream(messages.METHOD)()
        # Unlike `read()`, the iterator also returns what the master sent just before it ended the stream.
        self._incoming = aiter(self._stream)

    async def send(self, data: bytes) -> None:
        with contextlib.suppress(self._failed, asyncio.InvalidStateError):
            await self._stream.write(data)

    async def receive(self) -> bytes:
        try:
            data: bytes = await grpc_errors.wait_for_call(self._incoming.__anext__())
        except grpc_errors.CallCancelled as error:
            raise ConnectionLost(str(error)) from None
        except StopAsyncIteration:
            raise ConnectionLost(grpc_errors.ENDED) from None
        except self._failed as error:
            raise ConnectionLost(describe_failure(error, self._encrypted)) from None
        return data

    async def finish(self) -> None:
        with contextlib.suppress(self._failed, asyncio.InvalidStateError):
            await self._stream.done_writing()

    async def close(self) -> None:
        await self._channel.close()


class GrpcServerConnection:
    """The master's side of one stream of gRPC."""

    def __init__(self, stream: Any, grpc: ModuleType) -> None:
        self._stream = stream
        self._eof = grpc.aio.EOF
        self._failed: type[Exception] = grpc.aio.BaseError

    async def send(self, data: bytes) -> None:
        try:
            await self._stream.write(data)
        except self._failed as error:
            raise ConnectionLost(str(error)) from None

    async def receive(self) -> bytes:
        try:
            data = await self._stream.read()
        except self._failed as error:
            raise ConnectionLost(str(error)) from None
        if data is self._eof:
            raise ConnectionLost(grpc_errors.ENDED)
        message: bytes = data
        return message


def describe_failure(error: Any, encrypted: bool) -> str:
    """The clause for an RPC to the master that failed with this AioRpcError; `encrypted` if this node uses TLS."""
    details = grpc_errors.last_error(error.details() or error.code().name)
    problem = grpc_errors.classify(details)
    if problem is None:
        return details
    remedy = ": give --rdzv-endpoint another port" if problem is ConnectionProblem.OTHER_PROGRAM else ""
    return grpc_errors.describe(problem, MASTER, encrypted) + remedy
