"""A crowd of nodes of ours at a master: each with a connection of its own and the whole conversation of a real one.

`python -m rendezvous_bench.dlrover_nodes ORDER`. Only what a node does besides (start workers) is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

from dlrover_run.transport import auth, messages
from dlrover_run.transport.grpc_setup import CHANNEL_OPTIONS, load_grpc
from dlrover_run.transport.messages import Assigned, Challenge, Hello, Proof, Refused, Report
from rendezvous_bench.crowd import Join, Order, Tally, play
from rendezvous_bench.node import Node


class Guest:
    """A simulated node at its master."""

    def __init__(self, order: Order, number: int, tally: Tally) -> None:
        self._order = order
        self._node = Node(order, number, tally)
        self._rules = self._node.spec.rules
        self._sent = self._node.status
        self._changed = asyncio.Event()

    async def live(self, grpc: Any) -> None:
        """Join, and stay until the process ends."""
        async with grpc.aio.insecure_channel(self._order.address, options=CHANNEL_OPTIONS) as channel:
            stream = channel.stream_stream(messages.METHOD)()
            status = self._sent
            hello = Hello(messages.PROTOCOL, self._order.job, status.node_id, status.incarnation, auth.new_nonce())
            await stream.write(messages.encode(hello))
            challenge = messages.decode_from_master(await stream.read())
            if not isinstance(challenge, Challenge):
                raise ConnectionError(f"{status.node_id} was answered with {challenge}")
            await stream.write(messages.encode(Proof(auth.node_mac("", hello, challenge.nonce))))
            await stream.write(messages.encode(messages.Join(status, messages.encode_rules(self._rules))))
            await asyncio.gather(self._listen(grpc, stream), self._report(stream))

    async def _listen(self, grpc: Any, stream: Any) -> None:
        while (data := await stream.read()) is not grpc.aio.EOF:
            message = messages.decode_from_master(data)
            if isinstance(message, Refused):
                raise ConnectionError(f"{self._sent.node_id} was refused: {message.reason}")
            if isinstance(message, Assigned):
                self._node.hear(message.assignment)
                if self._node.status != self._sent:
                    self._changed.set()
        raise ConnectionError(f"the master ended the stream of {self._sent.node_id}: {await stream.code()}")

    async def _report(self, stream: Any) -> None:
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self._rules.keep_alive_interval)
            self._changed.clear()
            self._sent = self._node.status
            await stream.write(messages.encode(Report(self._sent)))


async def _live_all(guests: list[Guest], tally: Tally) -> None:
    grpc = load_grpc()
    try:
        await asyncio.gather(*(guest.live(grpc) for guest in guests))
    except (OSError, grpc.RpcError, messages.InvalidMessage) as error:
        tally.fail(f"{type(error).__name__}: {error}")
        sys.exit(1)


def _prepare(order: Order, tally: Tally) -> Join:
    load_grpc()
    guests = [Guest(order, number, tally) for number in range(order.first, order.first + order.count)]
    return lambda: asyncio.run(_live_all(guests, tally))


if __name__ == "__main__":
    play(_prepare)
