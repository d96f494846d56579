"""The connection to a cluster of etcd: one channel to one member at a time, the next member if it fails, with login.

The caller decides whether a failure ends anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from dlrover_run.background import Background, TimeLimit
from dlrover_run.rendezvous import kinds
from dlrover_run.store.etcd import codec
from dlrover_run.store.etcd.codec import Method
from dlrover_run.store.etcd.errors import (
    AuthNotEnabled,
    EndpointFailed,
    LoginRequired,
    check_tls_files,
    connection_failed,
    error_for_status,
    join_clauses,
)
from dlrover_run.store.operations import StoreMisconfigured, StoreUnavailable
from dlrover_run.transport import addresses, auth, grpc_errors, grpc_setup
from dlrover_run.transport.addresses import Address
from dlrover_run.transport.grpc_errors import ConnectionProblem
from dlrover_run.words.text import join_address

CALL_TIMEOUT = 3.0
"""Seconds that a member gets to answer, including the resolution of its name and a new connection; then the next one is
called. A cluster that has lost its leader elects another one in one or two seconds, but may never answer an earlier
request."""

MAX_RESPONSE = 64 * 1024 * 1024
"""Maximum bytes of a response of etcd: many times the reports of the largest job, and safe for the memory."""

PING_INTERVAL_MS = 6000
"""Milliseconds between two of gRPC's pings on a connection. etcd closes a connection with a ping every 5 s or less."""

PING_TIMEOUT_MS = 5000
"""Milliseconds after which an unanswered ping ends the connection, and another member is called; without this gRPC
waits a minute. It ends no node: that is what its lease is for."""

_OPTIONS = {
    **dict(grpc_setup.CHANNEL_OPTIONS),
    "grpc.max_receive_message_length": MAX_RESPONSE,
    "grpc.max_send_message_length": MAX_RESPONSE,
    "grpc.keepalive_time_ms": PING_INTERVAL_MS,
    "grpc.keepalive_timeout_ms": PING_TIMEOUT_MS,
    # Keepalive alone waits for 60 s on the ping's own timer.
    "grpc.http2.ping_timeout_ms": PING_TIMEOUT_MS,
    "grpc.http2.max_pings_without_data": 0,
    # etcd closes a connection that pings without an open call.
    "grpc.keepalive_permit_without_calls": 0,
}

RESOLVE_SHARE = 0.5
"""The share of a call's timeout for resolving a name. After that the name's previous addresses are used; without any
the call fails, and the next call waits for the same answer."""

PROBE_TIMEOUT = 3.0
"""Seconds for one probe of whether a server uses TLS."""

_SETTINGS = 4
"""The type of the first frame that each side of an HTTP/2 connection sends."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0))
_FRAME_HEADER = 9

Metadata = tuple[tuple[str, str], ...]

Answer = TypeVar("Answer")

Call = Callable[[Any, Metadata], Coroutine[Any, Any, Answer]]
"""Makes a call over a channel, with the metadata that authenticates this node."""

_Resolved = Sequence[Address] | addresses.UnresolvedHost


def unary_call(method: Method, request: Any) -> Call[Any]:

    async def call(channel: Any, metadata: Metadata) -> Any:
        encode, decode = method.request.SerializeToString, method.response.FromString
        rpc = channel.unary_unary(method.path, request_serializer=encode, response_deserializer=decode)
        return await rpc(request, metadata=metadata)

    return call


def open_stream(channel: Any, method: Method, metadata: Metadata) -> Any:
    encode, decode = method.request.SerializeToString, method.response.FromString
    rpc = channel.stream_stream(method.path, request_serializer=encode, response_deserializer=decode)
    return rpc(metadata=metadata)


class AddressCache:
    """Resolves the endpoints' names, and keeps the last addresses in case the name server is slow or unreachable."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Sequence[Address]] = {}
        self._resolving: dict[tuple[str, int], asyncio.Task[_Resolved]] = {}
        # `find` raises an unexpected error. One that no call waits for any more needs no report: the next call begins
        # anew, and raises its own.
        self._background = Background(lambda error: None)

    async def find(self, host: str, port: int, timeout: float) -> Sequence[Address]:
        """The current addresses of a name, or its previous ones if there is no answer within `timeout` seconds.

        Raises EndpointFailed without any. The resolution then continues, so that the next call may find its answer.
        """
        place = host, port
        resolving = self._resolving.get(place)
        if resolving is None:
            resolving = self._resolving[place] = self._background.start(self._resolve(host, port))
        with contextlib.suppress(TimeoutError):
            async with TimeLimit(timeout):
                await asyncio.wait([resolving])
        found = resolving.result() if resolving.done() and not resolving.cancelled() else None
        if known := self._known.get(place):
            return known
        if found is None:
            raise EndpointFailed(f"no name server returned an address for {host} within {timeout:g} s")
        raise EndpointFailed(str(found))

    def close(self) -> None:
        self._background.cancel()

    async def _resolve(self, host: str, port: int) -> _Resolved:
        # A failure is returned, because nothing may wait for it any more.
        try:
            found = self._known[host, port] = await addresses.resolve(host, port)
        except addresses.UnresolvedHost as problem:
            return problem
        finally:
            del self._resolving[host, port]
        return found


class EndpointChannel:
    """One channel to one endpoint, opened at the first call. A name with addresses of IPv4 and IPv6 is tried with one
    family on even laps and with the other on odd laps."""

    def __init__(self, spec: kinds.Store, names: AddressCache, host: str, port: int, lap: int) -> None:
        self.place = join_address(host, port)
        self._spec, self._names = spec, names
        self._host, self._port, self._lap = host, port, lap
        self._grpc = grpc_setup.load_grpc()
        self._channel: Any = None
        self._closed = False

    async def call(self, call: Call[Answer], metadata: Metadata, timeout: float) -> Answer:
        """Make a call over the channel. Raises what `error_for_status` returns, or EndpointFailed after `timeout`."""

        async def whole() -> Answer:
            return await call(await self._open(timeout * RESOLVE_SHARE), metadata)

        return await self.wait_for(whole(), timeout)

    async def wait_for(self, work: Coroutine[Any, Any, Answer], timeout: float | None) -> Answer:
        """Wait for work that uses the channel, as `call` does; None waits as long as the channel lives."""
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
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    async def _open(self, timeout: float) -> Any:
        if self._channel is None and not self._closed:
            found = await self._names.find(self._host, self._port, timeout)
            # Another call may have waited for the same addresses.
            if self._channel is None and not self._closed:
                families = list(dict.fromkeys(address.family for address in found))
                self._channel = self._connect(found, families[self._lap % len(families)])
        if self._closed:
            raise grpc_errors.CallCancelled
        return self._channel

    def _connect(self, found: Sequence[Address], family: socket.AddressFamily) -> Any:
        own = [address for address in found if address.family is family]
        try:
            return grpc_setup.open_channel(own, self.place, self._spec.tls, list(_OPTIONS.items()))
        except auth.TlsFileError as error:
            raise EndpointFailed(str(error)) from None


class EtcdConnection:
    """The endpoints in a random order (`rng` returns a random number from 0 to 1), so that nodes share the load."""

    def __init__(self, spec: kinds.Store, rng: Callable[[], float]) -> None:
        self.api = codec.load()
        self.spec = spec
        self._endpoints = sorted(spec.endpoints, key=lambda _: rng())
        self.tries = max(2, len(self._endpoints))
        self._names = AddressCache()
        self._turn = 0
        self._channel = self._next_channel()
        self._reached = self._closed = False
        self._logging_in = asyncio.Lock()
        # Empty without a user, and where the cluster has no users.
        self._token = None if spec.user else ""

    async def request(self, method: str, request: Any, timeout: float = CALL_TIMEOUT) -> Any:
        """Send one request and return the response, as `call` does."""
        _, answer = await self.call(unary_call(self.api.method(method), request), timeout)
        return answer

    async def call(self, call: Call[Answer], timeout: float = CALL_TIMEOUT) -> tuple[EndpointChannel, Answer]:
        """Make a call to the first endpoint that answers it, each within `timeout` seconds; return also the channel
        over which it was made. A single endpoint is tried twice.

        Raises StoreUnavailable, StoreMisconfigured, and what the answer means otherwise.
        """
        problems: dict[str, EndpointFailed] = {}
        for _ in range(self.tries):
            if self._closed:
                raise StoreUnavailable("this node has closed the connection")
            channel = self._channel
            try:
                answer = await self._with_login(channel, call, timeout)
            except EndpointFailed as error:
                problems[channel.place] = error
                await self.leave(channel)
            else:
                self._reached = True
                return channel, answer
        if not self._reached:
            if self.spec.tls is not None:
                check_tls_files(self.spec.tls)
            problems = {place: await self._explain(place, problem) for place, problem in problems.items()}
            if all(problem.is_user_error for problem in problems.values()):
                clauses = (f"etcd at {place}: {problem}" for place, problem in problems.items())
                raise StoreMisconfigured(f"{'; '.join(clauses)}. Correct the TLS settings in --rdzv-conf.")
        raise StoreUnavailable(join_clauses(problems))

    async def _explain(self, place: str, failed: EndpointFailed) -> EndpointFailed:
        """The same failure, or that only one side uses TLS, where a member closed the connection for that."""
        if failed.problem is not ConnectionProblem.CLOSED:
            return failed
        endpoint = next(endpoint for endpoint in self._endpoints if join_address(*endpoint) == place)
        try:
            address, *_ = await self._names.find(*endpoint, CALL_TIMEOUT)
        except EndpointFailed:
            return failed
        if self.spec.tls is None and await _answers_with_tls(address):
            return connection_failed(ConnectionProblem.TLS, self.spec)
        if self.spec.tls is not None and await _answers_without_tls(address):
            return connection_failed(ConnectionProblem.NO_TLS, self.spec)
        return failed

    async def leave(self, failed: EndpointChannel) -> None:
        """Continue with the next endpoint, unless another call over the same channel has already done so."""
        if failed is self._channel:
            self._turn += 1
            self._channel = self._next_channel()
            await failed.close()

    async def close(self) -> None:
        self._closed = True
        self._names.close()
        await self._channel.close()

    def _next_channel(self) -> EndpointChannel:
        lap, index = divmod(self._turn, len(self._endpoints))
        return EndpointChannel(self.spec, self._names, *self._endpoints[index], lap)

    async def _with_login(self, channel: EndpointChannel, call: Call[Answer], timeout: float) -> Answer:
        token = await self._log_in(channel, None) if self._token is None else self._token
        try:
            return await channel.call(call, _metadata(token), timeout)
        except LoginRequired as refusal:
            if not self.spec.user:
                raise refusal.otherwise from None
        token = await self._log_in(channel, token)
        try:
            return await channel.call(call, _metadata(token), timeout)
        except LoginRequired as refusal:
            raise refusal.otherwise from None

    async def _log_in(self, channel: EndpointChannel, stale: str | None) -> str:
        """A token other than the stale one, valid for all members."""
        async with self._logging_in:
            if self._token is None or self._token == stale:
                method = self.api.method("Auth.Authenticate")
                request = method.request(name=self.spec.user, password=self.spec.password)
                try:
                    answer = await channel.call(unary_call(method, request), (), CALL_TIMEOUT)
                    self._token = answer.token
                except AuthNotEnabled:
                    # As etcdctl does: users may be created before the administrator enables authentication.
                    self._token = ""
            return self._token


def _metadata(token: str) -> Metadata:
    return (("token", token),) if token else ()


# Whether a server uses TLS is probed where it closes each connection, as etcd does if only one side uses TLS. Only the
# beginning of a connection is sent, so no certificate is checked.


async def _answers_with_tls(address: Address) -> bool:
    """Whether the server takes part in a TLS handshake, even if it then demands a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        async with TimeLimit(PROBE_TIMEOUT):
            _, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except OSError:
        return False
    writer.transport.abort()
    return True


async def _answers_without_tls(address: Address) -> bool:
    """Whether the server answers in HTTP/2, which gRPC uses, without TLS."""
    try:
        async with TimeLimit(PROBE_TIMEOUT):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                writer.write(_PREFACE)
                header = await reader.readexactly(_FRAME_HEADER)
            finally:
                writer.transport.abort()
    except (OSError, EOFError):
        return False
    return header[3] == _SETTINGS
