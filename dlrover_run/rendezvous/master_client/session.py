"""The conversation of a node with the master over one connection: joining, and staying until the connection ends.

Both sides prove first that they know the job's token. What a refusal or the end of a connection means is the caller's
business (`client.py`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dlrover_run.background import Group, TimeLimit, beside
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.rendezvous.failure_detector import FailureDetector
from dlrover_run.transport import auth, messages
from dlrover_run.transport.connection import Connection, ConnectionLost
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
    Notice,
    Proof,
    ReadStacks,
    Refused,
    Report,
    StacksFound,
    Welcome,
)

HANDSHAKE_TIMEOUT = 20.0
"""Seconds from the first byte to the master's `Welcome`; after that the node retries. Two thousand nodes that joined at
once took 5 s with TLS."""

_MASTER = "master"
"""The only peer of a node's failure detector."""

Message = TypeVar("Message", bound=MasterMessage)


class MasterRefused(Exception):
    """The master refuses this node; the message is its reason. `retry`: the refusal may be temporary. `over`: the job
    of this node has ended. `moved`: the address of the successor that has the job. `authenticated`: the
    sender has proved that it knows the job's token, if there is one."""

    def __init__(self, reason: str, retry: bool, over: bool, authenticated: bool, moved: str = "") -> None:
        super().__init__(reason)
        self.moved = moved
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
            async with TimeLimit(HANDSHAKE_TIMEOUT):
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
            raise MasterRefused(message.reason, message.retry, message.over, self._authenticated, message.moved)
        return message

    async def finish(self) -> None:
        await self._connection.finish()


class Stay:
    """A node that has joined, until its connection ends: it reports, and receives what the master sends.

    `rules` are those of the job. `take`, `note` and `answer` get an assignment, a notice for the user, and a question
    for stacks, whose answer is None if there is none. `wait_for_change` waits until something is to be sent, or that
    time; `changed` ends that wait. `latest` is the report of this node now, and `is_closing` whether it is the last.
    """

    def __init__(
        self,
        session: MasterSession,
        rules: JobRules,
        latest: Callable[[], NodeReport],
        is_closing: Callable[[], bool],
        take: Callable[[Assignment], None],
        note: Callable[[str], None],
        answer: Callable[[ReadStacks], Awaitable[StacksFound | None]],
        changed: asyncio.Event,
        wait_for_change: Callable[[float], Awaitable[None]],
    ) -> None:
        self._session = session
        self._rules = rules
        self._latest = latest
        self._is_closing = is_closing
        self._take = take
        self._note = note
        self._answer = answer
        self._changed = changed
        self._wait_for_change = wait_for_change
        self._loop = asyncio.get_running_loop()
        self._found: list[StacksFound] = []
        self._detector: FailureDetector[str] = FailureDetector(rules.heartbeat_timeout)

    async def run(self, joined: NodeReport) -> None:
        """Report and receive until the connection ends, which raises ConnectionLost, or the last report is sent."""
        self._detector.heartbeat(_MASTER, self._loop.time())
        async with beside(self._receive()) as receiving, beside(self._report(joined)) as reporting:
            await asyncio.wait([reporting, receiving], return_when=asyncio.FIRST_COMPLETED)
            if reporting.done():
                reporting.result()
            await receiving

    async def _report(self, sent: NodeReport) -> None:
        """Send each new report, a heartbeat in each interval, and stacks that were asked for, until the last report.

        Raises ConnectionLost if the master sends nothing.
        """
        interval, timeout = self._rules.keep_alive_interval, self._rules.heartbeat_timeout
        next_report = self._loop.time() + interval
        while True:
            deadline = self._detector.next_deadline()
            assert deadline is not None, "the master is watched"
            due = min(next_report, deadline)
            if self._latest() == sent and not self._is_closing() and not self._found:
                await self._wait_for_change(due)
            now = self._loop.time()
            if self._detector.failed_peers(now, due):
                raise ConnectionLost(f"it has sent nothing for {timeout:g} s")
            report = self._latest()
            found, self._found = self._found, []
            if report != sent or now >= next_report:
                await self._send(Report(report), timeout)
                sent = report
                next_report = now + interval
            for message in found:
                await self._send(message, timeout)
            if self._is_closing() and self._latest() == sent:
                await self._session.finish()
                return

    async def _send(self, message: Report | StacksFound, timeout: float) -> None:
        try:
            async with TimeLimit(timeout):
                await self._session.send(message)
        except TimeoutError:
            raise ConnectionLost(f"it has read nothing for {timeout:g} s") from None

    async def _receive(self) -> None:
        async with Group() as tasks:
            while True:
                message = await self._session.receive()
                self._detector.heartbeat(_MASTER, self._loop.time())
                if isinstance(message, Assigned):
                    self._take(message.assignment)
                elif isinstance(message, Notice):
                    self._note(message.text)
                elif isinstance(message, ReadStacks):
                    tasks.create_task(self._answer_stacks(message))

    async def _answer_stacks(self, message: ReadStacks) -> None:
        """Read the stacks of this node's workers; `_report` sends them."""
        found = await self._answer(message)
        if found is not None:
            self._found.append(found)
            self._changed.set()
