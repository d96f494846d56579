"""One stream to a master: opened, both sides proved, messages in both directions, ended.

It holds no policy: whoever owns it decides what a refusal or an end means.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlrover_run.coordination.records import NodeStatus
from dlrover_run.coordination.rules import Rules
from dlrover_run.descent import guard
from dlrover_run.spec import MasterSpec, TlsSpec
from dlrover_run.wire import messages, proof, transport
from dlrover_run.wire.address import join_address
from dlrover_run.wire.messages import BadMessage, Challenge, FromMaster, FromNode, Hello, Join, Proof, Refused, Welcome
from dlrover_run.wire.own_address import Address

HANDSHAKE_TIMEOUT = 20.0
"""Seconds from the first byte to the master's welcome. Two thousand nodes that come at once took 5 s with TLS; after
this a node comes again later."""

_MOST_DETAILS = 300
"""Characters of gRPC's own words that are worth a place in a sentence."""

_OF_OTHER_PROGRAMS = ("Failed parsing HTTP/2", "http2 header with status", "Method not found")
"""Words of gRPC's about an answer that no server of gRPC gives, or none that is a master."""


class SessionEnded(Exception):
    """The stream has ended, or never began; the message is a clause that says why."""


class MasterRefuses(Exception):
    """The master lets this node in no more; the message is its reason. `retry` says that this may pass."""

    def __init__(self, reason: str, retry: bool) -> None:
        super().__init__(reason)
        self.retry = retry


class MasterUnproven(Exception):
    """Whoever answered does not know the job's token, so it is not obeyed."""


class Session:
    """One stream, open until `close`. `addresses` are those of one family.

    Raises SessionEnded at once when the files of TLS cannot be read.
    """

    def __init__(self, spec: MasterSpec, addresses: Sequence[Address]) -> None:
        grpc = transport.load_grpc()
        self._failed: type[Exception] = grpc.aio.AioRpcError
        self._token = spec.token
        self._encrypted = spec.tls is not None
        kind = "ipv6" if addresses[0].family is socket.AF_INET6 else "ipv4"
        # A percent sign parts a link-local address from its interface, and gRPC takes this for a URI.
        target = f"{kind}:{','.join(map(str, addresses))}".replace("%", "%25")
        # TLS compares the certificate with the endpoint as it was named, not with what that stands for.
        options = [*transport.CHANNEL_OPTIONS, ("grpc.default_authority", join_address(spec.host, spec.port))]
        # gRPC's threads begin here, and no signal may go to one of them.
        with guard.signals_for_this_thread():
            if spec.tls is None:
                self._channel = grpc.aio.insecure_channel(target, options=options)
            else:
                credentials = grpc.ssl_channel_credentials(*_read(spec.tls))
                self._channel = grpc.aio.secure_channel(target, credentials, options=options)
            self._stream = self._channel.stream_stream(messages.METHOD)()
        # Unlike `read()`, the iterator gives also what the master said just before it ended the stream.
        self._incoming = aiter(self._stream)

    async def join(self, job: str, status: NodeStatus, rules: Rules) -> Welcome:
        """Prove each other and take part. Raises SessionEnded, MasterRefuses and MasterUnproven."""
        try:
            return await asyncio.wait_for(self._join(job, status, rules), HANDSHAKE_TIMEOUT)
        except asyncio.TimeoutError:
            raise SessionEnded(f"it did not answer within {HANDSHAKE_TIMEOUT:g} s") from None

    async def _join(self, job: str, status: NodeStatus, rules: Rules) -> Welcome:
        hello = Hello(messages.PROTOCOL, job, status.node_id, status.incarnation, proof.fresh_nonce())
        await self.tell(hello)
        challenge = await self.hear()
        if not isinstance(challenge, Challenge):
            raise SessionEnded("it does not speak as a master does")
        if self._token and not proof.same(challenge.mac, proof.master_mac(self._token, hello, challenge.nonce)):
            raise MasterUnproven
        await self.tell(Proof(proof.node_mac(self._token, hello, challenge.nonce)))
        await self.tell(Join(status, messages.rule_values(rules)))
        welcome = await self.hear()
        if not isinstance(welcome, Welcome):
            raise SessionEnded("it does not speak as a master does")
        return welcome

    async def tell(self, message: FromNode) -> None:
        """Send a message. A stream that has ended says so, and why, to whoever hears it next."""
        with contextlib.suppress(self._failed, asyncio.InvalidStateError):
            await self._stream.write(messages.encode(message))

    async def hear(self) -> FromMaster:
        """The master's next word. Raises SessionEnded, and MasterRefuses for its last one."""
        try:
            message = messages.from_master(await self._next())
        except BadMessage as error:
            raise SessionEnded(f"what it said is {error}") from None
        except self._failed as error:
            raise SessionEnded(_clause(error, self._encrypted)) from None
        if isinstance(message, Refused):
            raise MasterRefuses(message.reason, message.retry)
        return message

    async def _next(self) -> bytes:
        # gRPC raises CancelledError for a stream that was broken off, as if this task had been cancelled; so another
        # task reads, and it is seen which of the two is meant.
        reading = asyncio.ensure_future(self._incoming.__anext__())
        try:
            await asyncio.wait([reading])
        finally:
            reading.cancel()
        if reading.cancelled():
            raise SessionEnded("the connection was broken off")
        try:
            data: bytes = reading.result()
        except StopAsyncIteration:
            raise SessionEnded("it ended the connection") from None
        return data

    async def finish(self) -> None:
        """Say nothing more: the master ends the stream once it has read all that was said before."""
        with contextlib.suppress(self._failed, asyncio.InvalidStateError):
            await self._stream.done_writing()

    async def close(self) -> None:
        """Let go of the connection."""
        await self._channel.close()


def _read(tls: TlsSpec) -> tuple[bytes | None, bytes | None, bytes | None]:
    """Root certificates, private key and certificate chain, in gRPC's order."""
    contents: list[bytes | None] = []
    for path in (tls.ca, tls.key, tls.cert):
        try:
            contents.append(None if path is None else Path(path).read_bytes())
        except OSError as error:
            raise SessionEnded(f"a file of TLS cannot be read ({error.strerror}): {path}") from None
    ca, key, cert = contents
    return ca, key, cert


def _clause(error: Any, encrypted: bool) -> str:
    """Why an RPC failed, from gRPC's own words, which begin with what everybody knows; `encrypted` by this node."""
    details = " ".join((error.details() or error.code().name).split())
    details = details.rpartition("last error: ")[2]
    if "Connection refused" in details:
        return "the connection was refused, so nobody listens there"
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return "its certificate is not signed by tls_ca, or is not valid now"
    if "Hostname Verification" in details:
        return "its certificate is for another name than the endpoint's"
    if "WRONG_VERSION_NUMBER" in details:
        return "it does not use TLS, and this node does"
    if "before receiving SETTINGS" in details:
        return "whoever listens there says nothing: another program, or a master that is stopped"
    if any(words in details for words in _OF_OTHER_PROGRAMS):
        return "another program listens there, which is no master: give --rdzv-endpoint another port"
    if "security handshaker" in details:
        return "tls_cert and tls_key do not belong together, or tls_ca is damaged"
    if encrypted and ("Socket closed" in details or "Connection reset" in details):
        return "it closed the connection, as a master does that does not trust tls_cert, or asks for one"
    if "Socket closed" in details:
        return "it closed the connection, as a master with TLS does to a node without"
    return details[:_MOST_DETAILS]
