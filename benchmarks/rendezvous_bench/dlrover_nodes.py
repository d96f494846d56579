"""A crowd of nodes of ours: each with a connection of its own and the whole conversation of a real one.

`python -m rendezvous_bench.dlrover_nodes ORDER`. Only what a node does besides (start workers) is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import msgspec

from dlrover_run.coordination.records import Assignment, NodePhase, NodeStatus
from dlrover_run.coordination.rules import Rules
from dlrover_run.wire import messages, proof
from dlrover_run.wire.messages import Assigned, Challenge, Hello, Proof, Refused, Report
from dlrover_run.wire.transport import CHANNEL_OPTIONS, load_grpc
from rendezvous_bench.crowd import Join, Order, Tally, play

WORKERS = 8


class Node:
    """One simulated node."""

    def __init__(self, order: Order, number: int, tally: Tally) -> None:
        self._order = order
        self._tally = tally
        self._rules = Rules(least=order.least, most=order.nodes)
        self._heard = False
        self._changed = asyncio.Event()
        name = f"node{number}"
        self._status = NodeStatus(
            node_id=name, incarnation="0", host=name, address="127.0.0.1", port=29500, workers=WORKERS
        )

    async def live(self, grpc: Any) -> None:
        """Join, and stay until the process ends."""
        async with grpc.aio.insecure_channel(self._order.address, options=CHANNEL_OPTIONS) as channel:
            stream = channel.stream_stream(messages.METHOD)()
            status = self._status
            hello = Hello(messages.PROTOCOL, self._order.job, status.node_id, status.incarnation, proof.fresh_nonce())
            await stream.write(messages.encode(hello))
            challenge = messages.from_master(await stream.read())
            if not isinstance(challenge, Challenge):
                raise ConnectionError(f"{status.host} was answered with {challenge}")
            await stream.write(messages.encode(Proof(proof.node_mac("", hello, challenge.nonce))))
            await stream.write(messages.encode(messages.Join(status, messages.rule_values(self._rules))))
            await asyncio.gather(self._listen(grpc, stream), self._report(stream))

    async def _listen(self, grpc: Any, stream: Any) -> None:
        while (data := await stream.read()) is not grpc.aio.EOF:
            message = messages.from_master(data)
            if isinstance(message, Refused):
                raise ConnectionError(f"{self._status.host} was refused: {message.reason}")
            if isinstance(message, Assigned):
                self._take(message.assignment)
        raise ConnectionError(f"the master ended the stream of {self._status.host}: {await stream.code()}")

    def _take(self, assignment: Assignment) -> None:
        if not self._heard:
            self._heard = True
            self._tally.reach("heard")
        seat = assignment.seat
        if seat is None or seat.key == self._status.heard:
            return
        self._tally.reach("seated", seat.nodes)
        self._status = msgspec.structs.replace(self._status, phase=NodePhase.RUNNING, seat=seat, heard=seat.key)
        self._changed.set()

    async def _report(self, stream: Any) -> None:
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self._rules.keep_alive_interval)
            self._changed.clear()
            await stream.write(messages.encode(Report(self._status)))


async def _live_all(order: Order, tally: Tally) -> None:
    grpc = load_grpc()
    nodes = [Node(order, number, tally) for number in range(order.first, order.first + order.count)]
    try:
        await asyncio.gather(*(node.live(grpc) for node in nodes))
    except (OSError, grpc.RpcError, messages.BadMessage) as error:
        tally.fail(f"{type(error).__name__}: {error}")
        sys.exit(1)


def _prepare(order: Order, tally: Tally) -> Join:
    load_grpc()
    return lambda: asyncio.run(_live_all(order, tally))


if __name__ == "__main__":
    play(_prepare)
