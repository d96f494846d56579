"""The addresses that the names of etcd's endpoints stand for, also while the name server is slow or away.

One channel to one endpoint of etcd, and what is done over it.

It holds no policy: whoever owns it decides what follows from a failure.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from dlrover_run.etcd.codec import Method
from dlrover_run.etcd.errors import EndpointFailed, error_for_status
from dlrover_run.process_tree import signals
from dlrover_run.spec import EtcdSpec
from dlrover_run.transport import addresses, auth, grpc_errors, grpc_setup
from dlrover_run.transport.addresses import Address, join_address

_Found = Sequence[Address] | addresses.UnresolvedHost


class AddressCache:
    """What was told last of each endpoint, and whom a name server is being asked for."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Sequence[Address]] = {}
        self._asking: dict[tuple[str, int], asyncio.Future[_Found]] = {}

    async def find(self, host: str, port: int, patience: float) -> Sequence[Address]:
        """The addresses that a name has now, or those that it had when nobody tells within `patience` seconds.

        Raises Broken when it never had any. The question is not withdrawn then, so that whoever comes next may find it
        answered.
        """
        place = host, port
        asking = self._asking.get(place)
        if asking is None:
            asking = self._asking[place] = asyncio.ensure_future(self._ask(host, port))
        await asyncio.wait([asking], timeout=patience)
        found = asking.result() if asking.done() and not asking.cancelled() else None
        if addresses := self._known.get(place):
            return addresses
        if found is None:
            raise EndpointFailed(f"no name server told the address of {host} within {patience:g} s")
        raise EndpointFailed(str(found))

    def close(self) -> None:
        """Wait for no answer any more."""
        for asking in self._asking.values():
            asking.cancel()

    async def _ask(self, host: str, port: int) -> _Found:
        # A failure is a result, because it may be that nobody asks for it any more.
        try:
            found = self._known[host, port] = await addresses.resolve(host, port)
        except addresses.UnresolvedHost as problem:
            return problem
        finally:
            del self._asking[host, port]
        return found


MAX_ANSWER = 64 * 1024 * 1024
"""Bytes that an answer of etcd may have: many times the statuses of the largest job, and nothing to die of."""

PING_INTERVAL_MS = 6000
"""Milliseconds between two pings of gRPC's own on a connection. etcd ends one that pings more often than each 5 s."""

_OPTIONS = {
    **dict(grpc_setup.CHANNEL_OPTIONS),
    "grpc.max_receive_message_length": MAX_ANSWER,
    "grpc.max_send_message_length": MAX_ANSWER,
    "grpc.keepalive_time_ms": PING_INTERVAL_MS,
    # etcd takes it ill when a connection pings on which nothing is asked.
    "grpc.keepalive_permit_without_calls": 0,
}

LOOKUP_SHARE = 0.5
"""The part of a call's time that the look-up of a name may take. Then the addresses are taken that the name had before;
where it never had any, the call has failed and the next one waits for the same answer."""

Metadata = tuple[tuple[str, str], ...]

Answer = TypeVar("Answer")

Call = Callable[[Any, Metadata], Coroutine[Any, Any, Answer]]
"""What to do over a channel, with the metadata that says who we are."""


def unary_call(method: Method, request: Any) -> Call[Any]:
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


class EndpointChannel:
    """One channel, opened when it is first needed. A name that stands for addresses of IPv4 and of IPv6 is tried with
    one of the two on even laps, with the other on odd ones."""

    def __init__(self, spec: EtcdSpec, names: AddressCache, host: str, port: int, lap: int) -> None:
        self.place = join_address(host, port)
        self._spec, self._names = spec, names
        self._host, self._port, self._lap = host, port, lap
        self._grpc = grpc_setup.load_grpc()
        self._channel: Any = None
        self._closed = False

    async def carry_out(self, action: Call[Answer], metadata: Metadata, timeout: float) -> Answer:
        """Do something over the channel. Raises what `error_for_status` returns, or EndpointFailed
        after `timeout` seconds."""

        async def whole() -> Answer:
            return await action(await self._open(timeout * LOOKUP_SHARE), metadata)

        return await self.settle(whole(), timeout)

    async def settle(self, work: Coroutine[Any, Any, Answer], timeout: float | None) -> Answer:
        """Wait for work that uses the channel, as `carry_out` does; None waits for as long as the channel lives."""
        try:
            return await grpc_errors.wait_for_call(work, timeout)
        except (grpc_errors.CallCancelled, grpc_errors.CallTimeout) as error:
            raise EndpointFailed(str(error)) from None
        except self._grpc.aio.AioRpcError as error:
            raise error_for_status(error.code().name, error.details() or "", self._spec) from None
        except (self._grpc.aio.BaseError, asyncio.InvalidStateError):
            # The channel was closed a moment ago.
            raise EndpointFailed(str(grpc_errors.CallCancelled())) from None

    async def close(self) -> None:
        """Let go of the channel; what is done over it breaks off."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    async def _open(self, patience: float) -> Any:
        if self._channel is None and not self._closed:
            addresses = await self._names.find(self._host, self._port, patience)
            # Somebody else may have waited for the same addresses.
            if self._channel is None and not self._closed:
                self._channel = self._connect(addresses)
        if self._closed:
            raise grpc_errors.CallCancelled
        return self._channel

    def _connect(self, addresses: Sequence[Address]) -> Any:
        families = list(dict.fromkeys(address.family for address in addresses))
        family = families[self._lap % len(families)]
        kind = "ipv6" if family is socket.AF_INET6 else "ipv4"
        places = ",".join(str(address) for address in addresses if address.family is family)
        # A percent sign parts a link-local address from its interface, and gRPC takes this for a URI.
        target = f"{kind}:{places}".replace("%", "%25")
        # TLS compares the certificate with the endpoint as it was named, not with what that stands for.
        options = [*_OPTIONS.items(), ("grpc.default_authority", self.place)]
        # gRPC's threads begin here, and no signal may go to one of them.
        with signals.blocked_in_new_threads():
            if self._spec.tls is None:
                return self._grpc.aio.insecure_channel(target, options=options)
            try:
                credentials = self._grpc.ssl_channel_credentials(*auth.read_tls_files(self._spec.tls))
            except auth.TlsFileError as error:
                raise EndpointFailed(str(error)) from None
            return self._grpc.aio.secure_channel(target, credentials, options=options)
