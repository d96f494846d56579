"""One channel to one endpoint of etcd, and what is done over it.

It holds no policy: whoever owns it decides what follows from a failure.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dlrover_run.descent import guard
from dlrover_run.etcd.answers import Broken, judge
from dlrover_run.etcd.messages import Method
from dlrover_run.spec import EtcdSpec, TlsSpec
from dlrover_run.wire import own_address, transport
from dlrover_run.wire.address import join_address

MAX_ANSWER = 64 * 1024 * 1024
"""Bytes that an answer of etcd may have: many times the statuses of the largest job, and nothing to die of."""

PING_INTERVAL_MS = 6000
"""Milliseconds between two pings of gRPC's own on a connection. etcd ends one that pings more often than each 5 s."""

_OPTIONS = {
    **dict(transport.CHANNEL_OPTIONS),
    "grpc.max_receive_message_length": MAX_ANSWER,
    "grpc.max_send_message_length": MAX_ANSWER,
    "grpc.keepalive_time_ms": PING_INTERVAL_MS,
    # etcd takes it ill when a connection pings on which nothing is asked.
    "grpc.keepalive_permit_without_calls": 0,
}

_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
"""Where distributions keep the authorities that they trust in one file (as in Go's crypto/x509)."""

Metadata = tuple[tuple[str, str], ...]

Answer = TypeVar("Answer")

Action = Callable[[Any, Metadata], Coroutine[Any, Any, Answer]]
"""What to do over a channel, with the metadata that says who we are."""


def ask(method: Method, request: Any) -> Action[Any]:
    """Ask once, and be answered once."""

    async def carry_out(channel: Any, metadata: Metadata) -> Any:
        encode, decode = method.request.SerializeToString, method.response.FromString
        call = channel.unary_unary(method.path, request_serializer=encode, response_deserializer=decode)
        return await call(request, metadata=metadata)

    return carry_out


def open_stream(channel: Any, method: Method, metadata: Metadata) -> Any:
    """A call in which both sides say as many things as they like."""
    encode, decode = method.request.SerializeToString, method.response.FromString
    call = channel.stream_stream(method.path, request_serializer=encode, response_deserializer=decode)
    return call(metadata=metadata)


class Line:
    """One channel, opened when it is first needed. A name that stands for addresses of IPv4 and of IPv6 is tried with
    one of the two on even laps, with the other on odd ones."""

    def __init__(self, spec: EtcdSpec, host: str, port: int, lap: int) -> None:
        self.place = join_address(host, port)
        self._spec = spec
        self._host, self._port, self._lap = host, port, lap
        self._grpc = transport.load_grpc()
        self._opening = asyncio.Lock()
        self._channel: Any = None
        self._closed = False

    async def carry_out(self, action: Action[Answer], metadata: Metadata, timeout: float) -> Answer:
        """Do something over the channel. Raises what `judge` makes of a failure, Broken after `timeout` seconds (more
        when a name has to be looked up first)."""
        return await self.settle(action(await self._open(), metadata), timeout)

    async def settle(self, work: Coroutine[Any, Any, Answer], timeout: float | None) -> Answer:
        """Wait for work that uses the channel, as `carry_out` does; None waits for as long as the channel lives."""
        # gRPC raises CancelledError for a call that was broken off, as if this task had been cancelled; so another task
        # does the work, and it is seen which of the two is meant.
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait([working], timeout=timeout)
            if not working.done():
                raise Broken(f"it did not answer within {timeout:g} s")
        finally:
            working.cancel()
        if working.cancelled():
            raise Broken("the connection was broken off")
        try:
            return working.result()
        except self._grpc.aio.AioRpcError as error:
            raise judge(error.code().name, error.details() or "", self._spec) from None
        except (self._grpc.aio.BaseError, asyncio.InvalidStateError):
            # The channel was closed a moment ago.
            raise Broken("the connection was broken off") from None

    async def close(self) -> None:
        """Let go of the channel; what is done over it breaks off."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    async def _open(self) -> Any:
        async with self._opening:
            if self._channel is None:
                try:
                    addresses = await own_address.look_up(self._host, self._port)
                except own_address.Unknown as error:
                    raise Broken(str(error)) from None
                if not self._closed:
                    self._channel = self._connect(addresses)
            if self._closed:
                raise Broken("the connection was broken off")
        return self._channel

    def _connect(self, addresses: Sequence[own_address.Address]) -> Any:
        families = list(dict.fromkeys(address.family for address in addresses))
        family = families[self._lap % len(families)]
        kind = "ipv6" if family is socket.AF_INET6 else "ipv4"
        places = ",".join(str(address) for address in addresses if address.family is family)
        # A percent sign parts a link-local address from its interface, and gRPC takes this for a URI.
        target = f"{kind}:{places}".replace("%", "%25")
        # TLS compares the certificate with the endpoint as it was named, not with what that stands for.
        options = [*_OPTIONS.items(), ("grpc.default_authority", self.place)]
        # gRPC's threads begin here, and no signal may go to one of them.
        with guard.signals_for_this_thread():
            if self._spec.tls is None:
                return self._grpc.aio.insecure_channel(target, options=options)
            credentials = self._grpc.ssl_channel_credentials(*_read(self._spec.tls))
            return self._grpc.aio.secure_channel(target, credentials, options=options)


def _read(tls: TlsSpec) -> tuple[bytes | None, bytes | None, bytes | None]:
    """Root certificates, private key and certificate chain, in gRPC's order."""
    ca, key, cert = (_content(path) for path in (find_authorities(tls), tls.key, tls.cert))
    return ca, key, cert


def find_authorities(tls: TlsSpec) -> str | None:
    """The file with the certificates of those who may sign a server's; None where the system has none.

    Without one gRPC trusts a list of its own, which does not know an authority that an administrator has added.
    """
    if tls.ca is not None:
        return tls.ca
    return ssl.get_default_verify_paths().cafile or next(filter(os.path.isfile, _BUNDLES), None)


def _content(path: str | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        # One that is being renewed may be there again in a moment.
        raise Broken(f"a file of TLS cannot be read ({error.strerror}): {path}") from None
