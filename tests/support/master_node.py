"""Shared by the tests of the master: a node that only speaks the protocol, over a real gRPC stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec

from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.master.server import MasterServer
from dlrover_run.transport import auth
from dlrover_run.transport.grpc_setup import CHANNEL_OPTIONS, load_grpc
from dlrover_run.transport.messages import (
    METHOD,
    PROTOCOL,
    Assigned,
    Challenge,
    Hello,
    Join,
    MasterMessage,
    NodeMessage,
    Proof,
    Refused,
    Report,
    Welcome,
    decode_from_master,
    encode,
    encode_rules,
)
from support.harness import WAIT

grpc = load_grpc()

PATIENT = 100.0
"""A heartbeat interval for nodes that send none: none of them is declared lost, however busy the machine is."""

FAST = JobRules(
    min_nodes=2, max_nodes=2, lost_after=0.05, last_call_timeout=0.05, max_restarts=3, keep_alive_interval=PATIENT
)
"""Rules with which a test never waits for a timeout whose outcome it knows."""


def status(name: str = "a", incarnation: str = "one", **fields: Any) -> NodeReport:
    values = {"host": f"host-{name}", "address": "10.0.0.1", "port": 4000, "workers": 2, **fields}
    return NodeReport(node_id=name, incarnation=incarnation, **values)


class Ended(Exception):
    """The master has ended the stream without the expected message."""


class Node:
    """One stream. `status` is its last report; `assignments` are kept in the order of their arrival."""

    def __init__(self, channel: Any, status: NodeReport, job: str = "job", token: str = "") -> None:
        self.status = status
        self.token = token
        self.hello = Hello(PROTOCOL, job, status.node_id, status.incarnation, auth.new_nonce())
        self.call = channel.stream_stream(METHOD)()
        # Unlike `read()`, the iterator also yields the messages that the master sent just before it ended the stream.
        self._incoming = aiter(self.call)
        self.assignment: Assignment | None = None

    async def send(self, *messages: NodeMessage) -> None:
        # If the master has ended the stream in the meantime, its reason can still be received.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for message in messages:
                await asyncio.wait_for(self.call.write(encode(message)), WAIT)

    async def receive(self) -> MasterMessage:
        """Return the next message of the master. Raises Ended."""
        try:
            data = await asyncio.wait_for(self._incoming.__anext__(), WAIT)
        except grpc.aio.AioRpcError as error:
            raise Ended(error.code()) from None
        except StopAsyncIteration:
            raise Ended("end of stream") from None
        except asyncio.CancelledError:
            if self.call.cancelled():
                raise Ended("cut") from None
            raise
        return decode_from_master(data)

    async def join(self, rules: JobRules = FAST) -> Welcome:
        """Open the stream. Raises AssertionError with the master's reason if it refuses."""
        await self.send(self.hello)
        challenge = await self.receive()
        assert isinstance(challenge, Challenge), challenge
        mac = auth.node_mac(self.token, self.hello, challenge.nonce)
        await self.send(Proof(mac), Join(self.status, encode_rules(rules)))
        shown = await self.receive()
        assert isinstance(shown, Proof), shown
        assert shown.mac == auth.master_mac(self.token, self.hello, challenge.nonce)
        welcome = await self.receive()
        assert isinstance(welcome, Welcome), welcome
        return welcome

    async def report(self, **fields: Any) -> None:
        self.status = msgspec.structs.replace(self.status, **fields)
        await self.send(Report(self.status))

    async def until(self, wanted: Callable[[Assignment], object]) -> Assignment:
        """Return the first assignment from now on for which `wanted` holds."""
        while True:
            word = await self.receive()
            assert isinstance(word, Assigned), word
            self.assignment = word.assignment
            if not self.status.epoch:
                # An agent reports this at once, with a port that it has reported to no other coordinator.
                await self.report(epoch=word.assignment.epoch)
            if wanted(word.assignment):
                return word.assignment

    async def take_ranks(self, number: int) -> Assignment:
        """Wait for ranks in that round, accept and report them."""
        found = await self.until(lambda wanted: wanted.ranks is not None and wanted.ranks.round == number)
        await self.report(phase=NodePhase.RUNNING, ranks=found.ranks, known_round=found.key, epoch=found.epoch)
        return found

    async def refused(self) -> Refused:
        """Return the last message of the master; earlier messages are skipped."""
        while not isinstance(word := await self.receive(), Refused):
            pass
        return word

    async def ended(self) -> None:
        """Wait for the end of the stream."""
        with contextlib.suppress(Ended):
            while True:
                await self.receive()

    async def close(self) -> None:
        """Close the stream: what was sent arrives before its end."""
        await self.call.done_writing()
        await self.ended()

    def cut(self) -> None:
        """Cancel the stream without a report."""
        self.call.cancel()


class Bed:
    """A master in this process, and channels to it. `said` has the lines that it logs."""

    def __init__(self) -> None:
        self.output: list[str] = []
        self.server: MasterServer
        self.address = ""
        self.channel: Any = None
        self.changed = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until the condition holds for the jobs of the master."""
        while not holds():
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), WAIT)

    def node(self, name: str = "a", job: str = "job", token: str = "", incarnation: str = "one", **fields: Any) -> Node:
        return Node(self.channel, status(name, incarnation, **fields), job, token)

    async def joined(self, *names: str, job: str = "job", rules: JobRules = FAST, token: str = "") -> list[Node]:
        """Return nodes that have joined, in this order."""
        nodes = [self.node(name, job, token) for name in names]
        for node in nodes:
            await node.join(rules)
        return nodes


@contextlib.asynccontextmanager
async def serving(token: str = "", state_dir: Path | None = None, port: int = 0) -> AsyncIterator[Bed]:
    """A master that listens on 127.0.0.1."""
    bed = Bed()
    bed.server = MasterServer(token, state_dir, bed.output.append, bed.changed.set)
    bed.address = f"127.0.0.1:{await bed.server.start(f'127.0.0.1:{port}')}"
    try:
        async with grpc.aio.insecure_channel(bed.address, options=CHANNEL_OPTIONS) as bed.channel:
            yield bed
    finally:
        await bed.server.stop("the test is over")
