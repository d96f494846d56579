"""The client of a master: one connection, kept open for as long as the node takes part in the job."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from dlrover_run.coordination.model import NodeReport
from dlrover_run.coordination.requests import OperatorRequest, RequestFailed, StackQuery
from dlrover_run.coordination.rules import JobRules
from dlrover_run.rendezvous import cut_off
from dlrover_run.rendezvous.client import AskFailed, OnChange
from dlrover_run.rendezvous.failure_detector import FailureDetector
from dlrover_run.rendezvous.master_launcher import CannotLaunchMaster, MasterLauncher
from dlrover_run.rendezvous.reconnect import Reaches, RemoteClient
from dlrover_run.spec import JobSpec, MasterSpec
from dlrover_run.transport import auth, messages
from dlrover_run.transport.addresses import Address, UnresolvedHost, join_address, resolve, route_source
from dlrover_run.transport.connection import Connect, Connection, ConnectionLost, GrpcConnection
from dlrover_run.transport.messages import (
    Answered,
    Ask,
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
    StacksFound,
    StacksWanted,
    Welcome,
    decode_rules,
)

if TYPE_CHECKING:
    from dlrover_run.coordination.stacks import JobStacks
    from dlrover_run.coordination.status import JobStatus

HANDSHAKE_TIMEOUT = 20.0
"""Seconds from the first byte to the master's `Welcome`; after that the node retries. Two thousand nodes that joined at
once took 5 s with TLS."""

_MASTER = "master"
"""The only peer of a node's failure detector."""

Message = TypeVar("Message", bound=MasterMessage)
Part = TypeVar("Part")


class MasterRefused(Exception):
    """The master refuses this node; the message is its reason. `retry`: the refusal may be temporary. `over`: the job
    of this node has ended. `authenticated`: the sender has proved that it knows the job's token, if there is one."""

    def __init__(self, reason: str, retry: bool, over: bool, authenticated: bool) -> None:
        super().__init__(reason)
        self.retry = retry
        self.over = over
        self.authenticated = authenticated


class MasterNotAuthenticated(Exception):
    """The server does not know the job's token, so this node ignores it."""


class MasterSession:
    """The protocol between a node and the master over one connection. The caller handles refusals and the end."""

    def __init__(self, connection: Connection, token: str) -> None:
        self._connection = connection
        self._token = token
        # Without a token there is nothing to prove.
        self._authenticated = not token

    async def join(self, job: str, report: NodeReport, rules: JobRules) -> Welcome:
        """Authenticate in both directions and join. Raises ConnectionLost, MasterRefused and MasterNotAuthenticated."""
        hello = Hello(messages.PROTOCOL, job, report.node_id, report.incarnation, auth.new_nonce())
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                await self._begin(hello, Join(report, messages.encode_rules(rules)))
                return await self._expect(Welcome)
        except TimeoutError:
            raise ConnectionLost(f"it did not answer within {HANDSHAKE_TIMEOUT:g} s") from None

    async def ask(self, job: str, question: Ask) -> Answered:
        """Authenticate in both directions, and ask about a job as a program that is no node. The caller limits the
        time. Raises ConnectionLost, MasterRefused and MasterNotAuthenticated."""
        asker = f"operator-{secrets.token_hex(8)}"
        await self._begin(Hello(messages.PROTOCOL, job, asker, asker, auth.new_nonce()), question)
        return await self._expect(Answered)

    async def _begin(self, hello: Hello, first: Join | Ask) -> None:
        """Prove the token, send the first message, and let the master prove the token."""
        await self.send(hello)
        challenge = await self._expect(Challenge)
        await self.send(Proof(auth.node_mac(self._token, hello, challenge.nonce)))
        await self.send(first)
        proof = await self._expect(Proof)
        if self._token and not auth.macs_equal(proof.mac, auth.master_mac(self._token, hello, challenge.nonce)):
            raise MasterNotAuthenticated
        self._authenticated = True

    async def _expect(self, kind: type[Message]) -> Message:
        message = await self.receive()
        if not isinstance(message, kind):
            raise ConnectionLost("it does not follow the protocol of a master")
        return message

    async def send(self, message: NodeMessage) -> None:
        """Send a message. If the connection has ended, `receive` reports that."""
        await self._connection.send(messages.encode(message))

    async def receive(self) -> MasterMessage:
        try:
            message = messages.decode_from_master(await self._connection.receive())
        except InvalidMessage as error:
            raise ConnectionLost(f"its message is {error}") from None
        if isinstance(message, Refused):
            raise MasterRefused(message.reason, message.retry, message.over, self._authenticated)
        return message

    async def finish(self) -> None:
        await self._connection.finish()


async def ask_master(
    spec: MasterSpec, job: str, request: OperatorRequest | None, connect: Connect = GrpcConnection
) -> JobStatus:
    """The status of a job, over a connection of its own. The caller limits the time. Raises AskFailed."""
    # Imported only here: a node that joins does not wait for it.
    from dlrover_run.coordination.status import JobStatus

    answer = await _ask(spec, job, Ask(request), connect)
    status = _decoded(spec, answer.status, JobStatus)
    if status is None or answer.refusal:
        raise AskFailed(f"{_server(spec)}: {answer.refusal}" if status is None else answer.refusal, status is None)
    return status


async def ask_master_for_stacks(
    spec: MasterSpec, job: str, query: StackQuery, connect: Connect = GrpcConnection
) -> JobStacks:
    """The stacks of a job's workers, over a connection of its own. The caller limits the time. Raises AskFailed."""
    from dlrover_run.coordination.stacks import JobStacks

    answer = await _ask(spec, job, Ask(stacks=query), connect)
    stacks = _decoded(spec, answer.stacks, JobStacks)
    if stacks is None:
        no_job = answer.status == messages.NULL
        raise AskFailed(f"{_server(spec)}: {answer.refusal}" if no_job else answer.refusal, no_job)
    return stacks


async def _ask(spec: MasterSpec, job: str, question: Ask, connect: Connect) -> Answered:
    """The master's answer. Raises AskFailed."""
    server = _server(spec)
    try:
        addresses = await resolve(spec.host, spec.port)
    except UnresolvedHost as unknown:
        raise AskFailed(str(unknown)) from None
    problem = AskFailed(f"{server} has no address")
    for _, group in itertools.groupby(addresses, lambda address: address.family):
        connection: Connection | None = None
        try:
            connection = connect(spec, list(group))
            return await MasterSession(connection, spec.token).ask(job, question)
        except ConnectionLost as ended:
            problem = AskFailed(f"{server} cannot be reached: {ended}")
        except MasterNotAuthenticated:
            raise AskFailed(f"{server} does not know this job's token") from None
        except MasterRefused as refusal:
            raise AskFailed(f"{server} refuses: {refusal}") from None
        finally:
            if connection is not None:
                await connection.close()
    raise problem


def _server(spec: MasterSpec) -> str:
    return f"the master at {join_address(spec.host, spec.port)}"


def _decoded(spec: MasterSpec, data: msgspec.Raw, kind: type[Part]) -> Part | None:
    """A part of an answer; None if it has none. Raises AskFailed."""
    try:
        return msgspec.json.decode(data, type=kind | None)
    except msgspec.DecodeError as error:
        raise AskFailed(f"the answer of {_server(spec)} cannot be read: {error}") from None


class MasterClient(RemoteClient):
    """Keeps one connection to the master of the job. `connect` opens one; `rng` returns a random number from 0 to 1."""

    return_rule = "master_timeout"

    def __init__(
        self,
        spec: JobSpec,
        on_change: OnChange,
        log: Callable[[str], None],
        connect: Connect = GrpcConnection,
        rng: Callable[[], float] = random.random,
        reaches: Reaches = cut_off.reaches,
    ) -> None:
        assert spec.master is not None, "the backend `master` has a master's endpoint"
        self._master = spec.master
        self._rules = spec.rules
        self._connect = connect
        self._launcher = MasterLauncher(spec.master, log)
        self._stacks_found: list[StacksFound] = []
        super().__init__(spec, _server(spec.master), on_change, log, rng, reaches=reaches)

    @property
    def pids(self) -> set[int]:
        """The master, if this node has started it. It outlives the agent because the other nodes need it."""
        return set(self._launcher.pids)

    async def ask(self, request: OperatorRequest | None = None) -> JobStatus:
        if self.is_away and self._latest_report is not None:
            if request is not None:
                raise AskFailed(f"{self._absence}; only `status`, `stacks` and `stop` of this node work")
            # Imported only here: a node that joins does not wait for it.
            from dlrover_run.rendezvous.own_node import own_status

            return own_status(self._spec.run_id, self._rules, self._latest_report, self._absence)
        return await ask_master(self._master, self._spec.run_id, request, self._connect)

    async def ask_stacks(self, query: StackQuery) -> JobStacks:
        if self.is_away and self._latest_report is not None and self.stack_source is not None:
            from dlrover_run.rendezvous.own_node import own_stacks

            try:
                return own_stacks(self._spec.run_id, self._latest_report, query, await self.stack_source(query.rank))
            except RequestFailed as failed:
                raise AskFailed(f"{failed}, and {self._absence}") from None
        return await ask_master_for_stacks(self._master, self._spec.run_id, query, self._connect)

    @property
    def _absence(self) -> str:
        return f"{self._server} cannot be reached{self._at_most()}"

    async def _attempt(self) -> None:
        try:
            await self._find()
        except ConnectionLost as ended:
            self._note_end(str(ended))
        except MasterNotAuthenticated:
            self._note_not_authenticated()
        except MasterRefused as refusal:
            self._note_refused(refusal)
        except CannotLaunchMaster as reason:
            if self._ever_connected:
                # It worked before. Workers may be running, and the state directory may come back.
                self._note_end(str(reason))
            else:
                self._give_up(str(reason), is_user_error=True)

    async def _find(self) -> None:
        """Connect to the master, which this node starts if it is the host, and stay connected until that ends."""
        try:
            addresses = await resolve(self._master.host, self._master.port)
        except UnresolvedHost as unknown:
            raise ConnectionLost(str(unknown)) from None
        if not self._is_leaving:
            await self._launcher.ensure(addresses)
        ended = ConnectionLost("it has no address")
        # A name may have addresses of two families, and a gRPC channel takes those of one.
        for _, group in itertools.groupby(addresses, lambda address: address.family):
            try:
                return await self._take_part_at(list(group))
            except ConnectionLost as error:
                if self._connected:
                    raise
                ended = error
        raise ended

    async def _take_part_at(self, addresses: list[Address]) -> None:
        if self._spec.local_addr is None:
            self._own_address = route_source(addresses[0]) or self._own_address
        connection = self._connect(self._master, addresses)
        try:
            session = MasterSession(connection, self._master.token)
            report = self._own_report()
            self._apply_welcome(await session.join(self._spec.run_id, report, self._rules))
            await self._stay(session, report)
        finally:
            await connection.close()

    async def _stay(self, session: MasterSession, joined: NodeReport) -> None:
        """Report and receive until the connection ends, which raises ConnectionLost, or `close` has finished."""
        detector: FailureDetector[str] = FailureDetector(self._rules.heartbeat_timeout)
        detector.heartbeat(_MASTER, self._loop.time())
        self._stacks_found.clear()
        receiving = asyncio.ensure_future(self._receive(session, detector))
        reporting = asyncio.ensure_future(self._report(session, detector, joined))
        try:
            await asyncio.wait([reporting, receiving], return_when=asyncio.FIRST_COMPLETED)
            if reporting.done():
                reporting.result()
            await receiving
        finally:
            for task in (reporting, receiving):
                task.cancel()
            # Both may have failed; one failure has been raised.
            await asyncio.gather(reporting, receiving, return_exceptions=True)

    async def _report(self, session: MasterSession, detector: FailureDetector[str], sent: NodeReport) -> None:
        """Send each new report, a heartbeat in each interval, and stacks that were asked for, until `close` is called.

        Raises ConnectionLost if the master sends nothing.
        """
        interval, timeout = self._rules.keep_alive_interval, self._rules.heartbeat_timeout
        next_report = self._loop.time() + interval
        while True:
            deadline = detector.next_deadline()
            assert deadline is not None, "the master is watched"
            due = min(next_report, deadline)
            if self._own_report() == sent and not self._closing and not self._stacks_found:
                await self._wait_for_change(due)
            now = self._loop.time()
            if detector.failed_peers(now, due):
                raise ConnectionLost(f"it has sent nothing for {timeout:g} s")
            report = self._own_report()
            found, self._stacks_found = self._stacks_found, []
            if report != sent or now >= next_report:
                await self._send(session, Report(report), timeout)
                sent = report
                next_report = now + interval
            for message in found:
                await self._send(session, message, timeout)
            if self._closing and self._own_report() == sent:
                await session.finish()
                return

    async def _send(self, session: MasterSession, message: Report | StacksFound, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await session.send(message)
        except TimeoutError:
            raise ConnectionLost(f"it has read nothing for {timeout:g} s") from None

    async def _receive(self, session: MasterSession, detector: FailureDetector[str]) -> None:
        finding: set[asyncio.Task[None]] = set()
        try:
            while True:
                message = await session.receive()
                detector.heartbeat(_MASTER, self._loop.time())
                if isinstance(message, Assigned):
                    self._take(message.assignment)
                elif isinstance(message, StacksWanted):
                    task = asyncio.ensure_future(self._find_stacks(message))
                    finding.add(task)
                    task.add_done_callback(finding.discard)
        finally:
            for task in finding:
                task.cancel()

    async def _find_stacks(self, wanted: StacksWanted) -> None:
        """Find the stacks of this node's workers; `_report` sends them."""
        if self.stack_source is not None:
            # Imported only here: a node that is not asked does not need it.
            from dlrover_run.rendezvous.find_stacks import find_stacks

            found = await find_stacks(self.stack_source, wanted.rank, self._log_once)
            if found is None:
                return
            self._stacks_found.append(StacksFound(wanted.number, msgspec.Raw(msgspec.json.encode(found))))
            self._changed.set()

    def _apply_welcome(self, welcome: Welcome) -> None:
        try:
            self._rules = decode_rules(welcome.rules)
        except InvalidMessage as error:
            raise ConnectionLost(f"its message is {error}") from None
        self._follow_rules(self._rules)
        self._note_connected()
        if welcome.notice:
            self._log_once(f"warning: {welcome.notice}")

    def _note_not_authenticated(self) -> None:
        """Handle a server without the job's token. At the start the token is wrong; later another process may listen at
        the endpoint, and it cannot end the job."""
        if self._ever_connected:
            self._note_end("the server there does not know the job's token")
        else:
            self._give_up(
                f"{self._server} does not know this job's token, so this node ignores it: "
                "give every node and the master the same one, by DLROVER_RDZV_TOKEN or --rdzv-conf token_file=PATH"
            )

    def _note_refused(self, refusal: MasterRefused) -> None:
        reason = f"{self._server} refuses this node: {refusal}"
        if refusal.over and refusal.authenticated:
            self._give_up(reason)
        elif (self._connected and refusal.retry) or (self._ever_connected and not refusal.authenticated):
            # Another process may listen at the address of a lost master: it cannot end a running job.
            self._note_end(str(refusal))
            if self._is_training and not (self._is_done or self._is_leaving):
                # A master has no console of its own, and its reason may be an internal error.
                self._log_once(f"{reason}; the workers train on")
        elif self._is_training and not self._connected:
            # A master that came back must not end running workers: it may be the wrong one.
            self._note_end(str(refusal))
            self._log_once(f"{reason}; running workers do not need it")
        else:
            self._note_refusal(reason, refusal.retry)

    def _note_end(self, reason: str, show_reason: bool = False) -> None:
        super()._note_end(self._launcher.problem or reason, show_reason)

    def _describe_absence(self, reason: str) -> str:
        text = super()._describe_absence(reason)
        if self._ever_connected or self._launcher.problem is not None:
            return text
        return f"{text}; the node with that address starts a master, or start one with `python -m dlrover_run.master`"
