"""The etcd client where another program listens."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_conversation import (
    ALL,
    RENEW_TIMEOUT,
    files,
    read,
    resumed,
    talk,
)
from support.harness import WAIT

from dlrover_run.rendezvous import kinds
from dlrover_run.store.etcd import codec
from dlrover_run.store.etcd.store import EtcdStore
from dlrover_run.store.operations import (
    StoreMisconfigured,
    StoreUnavailable,
)
from dlrover_run.transport import grpc_setup


@contextlib.asynccontextmanager
async def gateway(watch: Callable[[Any, Any], AsyncIterator[Any]] | None = None) -> AsyncIterator[kinds.Store]:
    """A gRPC server with this handler for watches, or without any method."""
    grpc = grpc_setup.load_grpc()
    method = codec.load().method("Watch.Watch")
    decode, encode = method.request.FromString, method.response.SerializeToString
    handlers = {} if watch is None else {"Watch": grpc.stream_stream_rpc_method_handler(watch, decode, encode)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("etcdserverpb.Watch", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield kinds.Store((("127.0.0.1", port),))
    finally:
        await server.stop(None)


def test_a_stream_that_ends_each_time_is_not_reopened_for_ever() -> None:
    opened = 0

    async def end_at_once(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        nonlocal opened
        opened += 1
        await anext(requests)
        yield codec.load().message("WatchResponse")(created=True)

    async def conversation() -> None:
        async with gateway(end_at_once) as spec:
            client = EtcdStore(spec, RENEW_TIMEOUT)
            with pytest.raises(StoreUnavailable, match="it ended the connection"):
                await anext(resumed(client, [ALL], 1))
            await client.close()

    asyncio.run(conversation())
    assert opened == 2


def test_a_grpc_server_that_is_not_etcd_is_unavailable() -> None:
    async def conversation() -> None:
        async with gateway() as spec:
            client = EtcdStore(spec, RENEW_TIMEOUT)
            with pytest.raises(StoreUnavailable, match="another program listens there, which is not etcd v3"):
                await read(client)
            await client.close()

    asyncio.run(conversation())


@contextlib.contextmanager
def other_program(says: bytes | None) -> Iterator[tuple[str, int]]:
    """A server that answers each client with these bytes, or None: it never answers."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while says is not None:
                with server.accept()[0] as connection:
                    connection.recv(4096)
                    connection.sendall(says)

    serving_thread = threading.Thread(target=serve, daemon=True)
    serving_thread.start()
    yield "127.0.0.1", server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    serving_thread.join(WAIT)
    server.close()


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", b"SSH-2.0-Other\r\n"])
def test_another_program_is_reported_as_not_etcd(etcd_certificates: Path, says: bytes) -> None:
    with other_program(says) as place:
        with pytest.raises(StoreUnavailable, match="another program listens there, which is not etcd"):
            talk(kinds.Store((place,)), read)
        with pytest.raises(StoreMisconfigured, match="it does not use TLS"):
            talk(kinds.Store((place,), tls=files(etcd_certificates)), read)


@pytest.mark.parametrize("tls", [False, True])
def test_a_program_that_closes_each_connection_is_unavailable(etcd_certificates: Path, tls: bool) -> None:
    with other_program(b"") as place, pytest.raises(StoreUnavailable, match="it closed the connection"):
        talk(kinds.Store((place,), tls=files(etcd_certificates) if tls else None), read)


def test_a_program_that_never_answers_is_reported_as_not_etcd() -> None:
    with other_program(None) as place, pytest.raises(StoreUnavailable, match="did not answer"):
        talk(kinds.Store((place,)), read)
