"""One stream to a master: opened, both sides proved, messages in both directions, ended.

It holds no policy: whoever owns it decides what a refusal or an end means.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Sequence
from typing import Any

from dlrover_run.backends.clock import clock_skew
from dlrover_run.coordination.records import NodeStatus
from dlrover_run.coordination.rules import Rules
from dlrover_run.process_tree import signals
from dlrover_run.spec import MasterSpec
from dlrover_run.wire import calls, clauses, messages, proof, tls_files, transport
from dlrover_run.wire.address import join_address
from dlrover_run.wire.clauses import Trouble
from dlrover_run.wire.messages import BadMessage, Challenge, FromMaster, FromNode, Hello, Join, Proof, Refused, Welcome
from dlrover_run.wire.own_address import Address

HANDSHAKE_TIMEOUT = 20.0
"""Seconds from the first byte to the master's welcome. Two thousand nodes that come at once took 5 s with TLS; after
this a node comes again later."""

_MASTER = clauses.Kind("master", "master")

_OF_TLS = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not signed by tls_ca, or is not valid now",
    "Hostname Verification": "its certificate is for another name than the endpoint's",
    "WRONG_VERSION_NUMBER": "it does not use TLS, and this node does",
}
"""What is said for words of gRPC's about a handshake that failed."""


class SessionEnded(Exception):
    """The stream has ended, or never began; the message is a clause that says why."""


class MasterRefuses(Exception):
    """The master lets this node in no more; the message is its reason. `retry` says that this may pass, and `proven`
    that the sender is known to be a master of the job, as far as a token can show that."""

    def __init__(self, reason: str, retry: bool, proven: bool) -> None:
        super().__init__(reason)
        self.retry = retry
        self.proven = proven


class MasterUnproven(Exception):
    """Whoever answered does not know the job's token, so it is not obeyed."""


class Session:
    """One stream, open until `close`. `addresses` are those of one family. `skew` is how many seconds this node's clock
    is ahead of the master's, None when they agree or the master has not said.

    Raises SessionEnded at once when the files of TLS cannot be read.
    """

    def __init__(self, spec: MasterSpec, addresses: Sequence[Address]) -> None:
        grpc = transport.load_grpc()
        self._failed: type[Exception] = grpc.aio.AioRpcError
        self._token = spec.token
        # Without a token there is nothing to prove.
        self._proven = not spec.token
        self._encrypted = spec.tls is not None
        kind = "ipv6" if addresses[0].family is socket.AF_INET6 else "ipv4"
        # A percent sign parts a link-local address from its interface, and gRPC takes this for a URI.
        target = f"{kind}:{','.join(map(str, addresses))}".replace("%", "%25")
        # TLS compares the certificate with the endpoint as it was named, not with what that stands for.
        options = [*transport.CHANNEL_OPTIONS, ("grpc.default_authority", join_address(spec.host, spec.port))]
        # gRPC's threads begin here, and no signal may go to one of them.
        with signals.blocked_in_new_threads():
            if spec.tls is None:
                self._channel = grpc.aio.insecure_channel(target, options=options)
            else:
                try:
                    credentials = grpc.ssl_channel_credentials(*tls_files.read(spec.tls))
                except tls_files.Unreadable as error:
                    raise SessionEnded(str(error)) from None
                self._channel = grpc.aio.secure_channel(target, credentials, options=options)
            self._stream = self._channel.stream_stream(messages.METHOD)()
        # Unlike `read()`, the iterator gives also what the master said just before it ended the stream.
        self._incoming = aiter(self._stream)
        self.skew: float | None = None

    async def join(self, job: str, status: NodeStatus, rules: Rules) -> Welcome:
        """Prove each other and take part. Raises SessionEnded, MasterRefuses and MasterUnproven."""
        try:
            return await asyncio.wait_for(self._join(job, status, rules), HANDSHAKE_TIMEOUT)
        except TimeoutError:
            raise SessionEnded(f"it did not answer within {HANDSHAKE_TIMEOUT:g} s") from None

    async def _join(self, job: str, status: NodeStatus, rules: Rules) -> Welcome:
        hello = Hello(messages.PROTOCOL, job, status.node_id, status.incarnation, proof.fresh_nonce())
        await self.tell(hello)
        challenge = await self.hear()
        if not isinstance(challenge, Challenge):
            raise SessionEnded("it does not speak as a master does")
        asked = time.monotonic()
        await self.tell(Proof(proof.node_mac(self._token, hello, challenge.nonce)))
        await self.tell(Join(status, messages.rule_values(rules)))
        shown = await self.hear()
        if not isinstance(shown, Proof):
            raise SessionEnded("it does not speak as a master does")
        if self._token and not proof.same(shown.mac, proof.master_mac(self._token, hello, challenge.nonce)):
            raise MasterUnproven
        self._proven = True
        welcome = await self.hear()
        if not isinstance(welcome, Welcome):
            raise SessionEnded("it does not speak as a master does")
        if welcome.time:
            self.skew = clock_skew(welcome.time, time.time(), time.monotonic() - asked)
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
            raise MasterRefuses(message.reason, message.retry, self._proven)
        return message

    async def _next(self) -> bytes:
        try:
            data: bytes = await calls.settle(self._incoming.__anext__())
        except calls.BrokenOff as error:
            raise SessionEnded(str(error)) from None
        except StopAsyncIteration:
            raise SessionEnded(clauses.ENDED) from None
        return data

    async def finish(self) -> None:
        """Say nothing more: the master ends the stream once it has read all that was said before."""
        with contextlib.suppress(self._failed, asyncio.InvalidStateError):
            await self._stream.done_writing()

    async def close(self) -> None:
        """Let go of the connection."""
        await self._channel.close()


def _clause(error: Any, encrypted: bool) -> str:
    """Why an RPC failed, from gRPC's own words; `encrypted` by this node."""
    details = clauses.shorten(error.details() or error.code().name)
    for words, clause in _OF_TLS.items():
        if words in details:
            return clause
    trouble = clauses.find_trouble(details)
    if trouble is Trouble.OTHER_PROGRAM:
        return f"{_MASTER.missing}: give --rdzv-endpoint another port"
    if trouble is not Trouble.REFUSED and "security handshaker" in details:
        return "tls_cert and tls_key do not belong together, or tls_ca is damaged"
    if trouble is Trouble.CLOSED and encrypted:
        return f"{clauses.CLOSED}, as a master does that does not trust tls_cert, or asks for one"
    if trouble is Trouble.CLOSED and "Socket closed" in details:
        return f"{clauses.CLOSED}, as a master with TLS does to a node without"
    return details if trouble is None else clauses.say(trouble, _MASTER)
