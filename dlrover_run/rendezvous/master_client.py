"""One stream to a master: opened, both sides proved, messages in both directions, ended.

It holds no policy: whoever owns it decides what a refusal or an end means.


Records that live in a master: this node's end of the stream, kept up for as long as the node takes part in the job.

The master may die, be silent, come back, or be another one. Workers never notice; what the coordinator wants is what
it said last.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Callable, Sequence
from typing import Any

from dlrover_run.coordination.records import NodeReport
from dlrover_run.coordination.rules import JobRules
from dlrover_run.process_tree import signals
from dlrover_run.rendezvous.client import OnChange
from dlrover_run.rendezvous.master_launcher import CannotLaunchMaster, MasterLauncher
from dlrover_run.rendezvous.reconnect import RemoteClient, Silence
from dlrover_run.spec import JobSpec, MasterSpec
from dlrover_run.transport import auth, grpc_errors, grpc_setup, messages
from dlrover_run.transport.addresses import Address, UnresolvedHost, join_address, resolve, route_source
from dlrover_run.transport.grpc_errors import ConnectionProblem
from dlrover_run.transport.messages import (
    Assigned,
    Challenge,
    Hello,
    InvalidMessage,
    Join,
    MasterMessage,
    NodeMessage,
    Proof,
    Refused,
    Report,
    Welcome,
    decode_rules,
)

HANDSHAKE_TIMEOUT = 20.0
"""Seconds from the first byte to the master's welcome. Two thousand nodes that come at once took 5 s with TLS; after
this a node comes again later."""

_MASTER = grpc_errors.ServerKind("master", "master")

_OF_TLS = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not signed by tls_ca, or is not valid now",
    "Hostname Verification": "its certificate is for another name than the endpoint's",
    "WRONG_VERSION_NUMBER": "it does not use TLS, and this node does",
}
"""What is said for words of gRPC's about a handshake that failed."""


class ConnectionLost(Exception):
    """The stream has ended, or never began; the message is a clause that says why."""


class MasterRefused(Exception):
    """The master lets this node in no more; the message is its reason. `retry` says that this may pass, and `proven`
    that the sender is known to be a master of the job, as far as a token can show that."""

    def __init__(self, reason: str, retry: bool, proven: bool) -> None:
        super().__init__(reason)
        self.retry = retry
        self.proven = proven


class MasterNotAuthenticated(Exception):
    """Whoever answered does not know the job's token, so it is not obeyed."""


class MasterConnection:
    """One stream, open until `close`. `addresses` are those of one family.

    Raises ConnectionLost at once when the files of TLS cannot be read.
    """

    def __init__(self, spec: MasterSpec, addresses: Sequence[Address]) -> None:
        grpc = grpc_setup.load_grpc()
        self._failed: type[Exception] = grpc.aio.AioRpcError
        self._token = spec.token
        # Without a token there is nothing to prove.
        self._proven = not spec.token
        self._encrypted = spec.tls is not None
        kind = "ipv6" if addresses[0].family is socket.AF_INET6 else "ipv4"
        # A percent sign parts a link-local address from its interface, and gRPC takes this for a URI.
        target = f"{kind}:{','.join(map(str, addresses))}".replace("%", "%25")
        # TLS compares the certificate with the endpoint as it was named, not with what that stands for.
        options = [*grpc_setup.CHANNEL_OPTIONS, ("grpc.default_authority", join_address(spec.host, spec.port))]
        # gRPC's threads begin here, and no signal may go to one of them.
        with signals.blocked_in_new_threads():
            if spec.tls is None:
                self._channel = grpc.aio.insecure_channel(target, options=options)
            else:
                try:
                    credentials = grpc.ssl_channel_credentials(*auth.read_tls_files(spec.tls))
                except auth.TlsFileError as error:
                    raise ConnectionLost(str(error)) from None
                self._channel = grpc.aio.secure_channel(target, credentials, options=options)
            self._stream = self._channel.stream_stream(messages.METHOD)()
        # Unlike `read()`, the iterator gives also what the master said just before it ended the stream.
        self._incoming = aiter(self._stream)

    async def join(self, job: str, status: NodeReport, rules: JobRules) -> Welcome:
        """Prove each other and take part. Raises ConnectionLost, MasterRefused and MasterNotAuthenticated."""
        try:
            return await asyncio.wait_for(self._join(job, status, rules), HANDSHAKE_TIMEOUT)
        except TimeoutError:
            raise ConnectionLost(f"it did not answer within {HANDSHAKE_TIMEOUT:g} s") from None

    async def _join(self, job: str, status: NodeReport, rules: JobRules) -> Welcome:
        hello = Hello(messages.PROTOCOL, job, status.node_id, status.incarnation, auth.new_nonce())
        await self.tell(hello)
        challenge = await self.hear()
        if not isinstance(challenge, Challenge):
            raise ConnectionLost("it does not speak as a master does")
        await self.tell(Proof(auth.node_mac(self._token, hello, challenge.nonce)))
        await self.tell(Join(status, messages.encode_rules(rules)))
        shown = await self.hear()
        if not isinstance(shown, Proof):
            raise ConnectionLost("it does not speak as a master does")
        if self._token and not auth.macs_equal(shown.mac, auth.master_mac(self._token, hello, challenge.nonce)):
            raise MasterNotAuthenticated
        self._proven = True
        welcome = await self.hear()
        if not isinstance(welcome, Welcome):
            raise ConnectionLost("it does not speak as a master does")
        return welcome

    async def tell(self, message: NodeMessage) -> None:
        """Send a message. A stream that has ended says so, and why, to whoever hears it next."""
        with contextlib.suppress(self._failed, asyncio.InvalidStateError):
            await self._stream.write(messages.encode(message))

    async def hear(self) -> MasterMessage:
        """The master's next word. Raises ConnectionLost, and MasterRefused for its last one."""
        try:
            message = messages.decode_from_master(await self._next())
        except InvalidMessage as error:
            raise ConnectionLost(f"what it said is {error}") from None
        except self._failed as error:
            raise ConnectionLost(_clause(error, self._encrypted)) from None
        if isinstance(message, Refused):
            raise MasterRefused(message.reason, message.retry, self._proven)
        return message

    async def _next(self) -> bytes:
        try:
            data: bytes = await grpc_errors.wait_for_call(self._incoming.__anext__())
        except grpc_errors.CallCancelled as error:
            raise ConnectionLost(str(error)) from None
        except StopAsyncIteration:
            raise ConnectionLost(grpc_errors.ENDED) from None
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
    details = grpc_errors.last_error(error.details() or error.code().name)
    for words, clause in _OF_TLS.items():
        if words in details:
            return clause
    trouble = grpc_errors.classify(details)
    if trouble is ConnectionProblem.OTHER_PROGRAM:
        return f"{_MASTER.missing}: give --rdzv-endpoint another port"
    if trouble is not ConnectionProblem.REFUSED and "security handshaker" in details:
        return "tls_cert and tls_key do not belong together, or tls_ca is damaged"
    if trouble is ConnectionProblem.CLOSED and encrypted:
        return f"{grpc_errors.CLOSED}, as a master does that does not trust tls_cert, or asks for one"
    if trouble is ConnectionProblem.CLOSED and "Socket closed" in details:
        return f"{grpc_errors.CLOSED}, as a master with TLS does to a node without"
    return details if trouble is None else grpc_errors.describe(trouble, _MASTER)


class MasterClient(RemoteClient):
    """Keeps one stream to the master of the job."""

    def __init__(self, spec: JobSpec, listener: OnChange, say: Callable[[str], None]) -> None:
        assert spec.master is not None, "the backend `master` comes with the place of one"
        self._master = spec.master
        self._rules = spec.rules
        self._hosting = MasterLauncher(spec.master, say)
        super().__init__(spec, f"the master at {join_address(spec.master.host, spec.master.port)}", listener, say)

    @property
    def pids(self) -> set[int]:
        """The master, where this node has started it: it outlives the agent for the sake of the other nodes."""
        return set(self._hosting.pids)

    async def _attempt(self) -> None:
        try:
            await self._find()
        except ConnectionLost as ended:
            self._note_end(str(ended))
        except MasterNotAuthenticated:
            self._note_unproven()
        except MasterRefused as refusal:
            self._note_word(refusal)
        except CannotLaunchMaster as reason:
            if self._met:
                # It could once; workers may be running, and the directory may come back.
                self._note_end(str(reason))
            else:
                self._give_up(str(reason), is_user_error=True)

    async def _find(self) -> None:
        """Find the master, which this node starts if it is the host, and stay connected until that ends."""
        try:
            addresses = await resolve(self._master.host, self._master.port)
        except UnresolvedHost as unknown:
            raise ConnectionLost(str(unknown)) from None
        if not self._visits and not self._leaves:
            await self._hosting.ensure(addresses)
        ended = ConnectionLost("it has no address")
        # A name may stand for addresses of two families, of which gRPC takes one at a time.
        for _, group in itertools.groupby(addresses, lambda address: address.family):
            try:
                return await self._meet(list(group))
            except ConnectionLost as error:
                if self._connected:
                    raise
                ended = error
        raise ended

    async def _meet(self, addresses: list[Address]) -> None:
        if self._spec.local_addr is None:
            self._own_address = route_source(addresses[0]) or self._own_address
        session = MasterConnection(self._master, addresses)
        try:
            status = self._own_status()
            welcome = await session.join(self._spec.run_id, status, self._rules)
            self._take_welcome(welcome)
            await self._stay(session, status)
        finally:
            await session.close()

    async def _stay(self, session: MasterConnection, joined: NodeReport) -> None:
        """Report and listen until the stream ends, which is ConnectionLost, or `close` has been carried out."""
        silence = Silence(self._rules.heartbeat_timeout, self._loop.time())
        listening = asyncio.ensure_future(self._listen(session, silence))
        reporting = asyncio.ensure_future(self._report(session, silence, joined, listening))
        try:
            await asyncio.wait([reporting, listening], return_when=asyncio.FIRST_COMPLETED)
            if reporting.done():
                reporting.result()
            await listening
        finally:
            for task in (reporting, listening):
                task.cancel()
            # Both may have failed; one has been heard.
            await asyncio.gather(reporting, listening, return_exceptions=True)

    async def _report(
        self, session: MasterConnection, silence: Silence, sent: NodeReport, listening: asyncio.Future[None]
    ) -> None:
        """Send each change of the status, and a sign of life in each interval, until nobody listens any more."""
        interval = self._rules.keep_alive_interval
        next_report = self._loop.time() + interval
        # A cancellation is not enough: before Python 3.12 `wait_for` loses one that comes in the very moment in which
        # what it waits for is done, and the end of a stream is what both of them wait for.
        while not listening.done():
            due = min(next_report, silence.deadline)
            if self._own_status() == sent and not self._closing:
                await self._wait_for_change(due)
            now = self._loop.time()
            if silence.too_long(due, now):
                raise ConnectionLost(f"it has been silent for {self._rules.heartbeat_timeout:g} s")
            status = self._own_status()
            if status != sent or now >= next_report:
                try:
                    await asyncio.wait_for(session.tell(Report(status)), self._rules.heartbeat_timeout)
                except TimeoutError:
                    raise ConnectionLost(f"it has read nothing for {self._rules.heartbeat_timeout:g} s") from None
                sent = status
                next_report = now + interval
            if self._closing and self._own_status() == sent:
                await session.finish()
                return

    async def _listen(self, session: MasterConnection, silence: Silence) -> None:
        while True:
            message = await session.hear()
            silence.hear(self._loop.time())
            if isinstance(message, Assigned):
                self._take(message.assignment)

    def _take_welcome(self, welcome: Welcome) -> None:
        try:
            self._rules = decode_rules(welcome.rules)
        except InvalidMessage as error:
            raise ConnectionLost(f"what it said is {error}") from None
        self._search.join_timeout = self._rules.join_timeout
        self._note_connected()
        if welcome.notice:
            self._tell_once(f"warning: {welcome.notice}")

    def _note_unproven(self) -> None:
        """Whoever sits at the endpoint of a running job cannot end it; at the start somebody has mistaken the token."""
        if self._met:
            self._note_end("what answers there does not know the job's token")
        else:
            self._give_up(
                f"{self._place} does not know this job's token, so this node does not obey it: "
                "give every node and the master the same one, by DLROVER_RDZV_TOKEN or --rdzv-conf token_file=PATH"
            )

    def _note_word(self, refusal: MasterRefused) -> None:
        """The master has ended the stream with a reason, or lets the node in no more."""
        reason = f"{self._place} refuses this node: {refusal}"
        if (self._connected and refusal.retry) or (self._met and not refusal.proven):
            # Another process may have taken the place of a lost master: it cannot end a job that has begun.
            self._note_end(str(refusal))
        elif self._trains and not self._connected:
            # A master that came back has nothing to set against workers that train: it may be the one that is wrong.
            self._note_end(str(refusal))
            self._tell_once(f"{reason}; the workers train on")
        else:
            self._note_refusal(reason, refusal.retry)

    def _why_away(self, reason: str) -> str:
        said = super()._why_away(self._hosting.problem or reason)
        if self._met or self._hosting.problem is not None:
            return said
        return f"{said}; the node whose address that is starts one, or `python -m dlrover_run.master`"

    def _why_not_yet(self, reason: str) -> str:
        return self._hosting.problem or reason
