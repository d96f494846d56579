"""The master client of a node: `MasterClient` of the product, over a connection of the simulated network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from dlrover_run.rendezvous import kinds
from dlrover_run.rendezvous.master_client.client import MasterClient
from dlrover_run.spec import JobSpec
from dlrover_run.transport.addresses import Address
from dlrover_run.transport.connection import ConnectionLost
from simulation.masters import Inbox, Masters
from simulation.network import TO_MASTER, TO_NODE, Stream
from simulation.nodes import Node, NodeClient, WatchedClient

SPEC = kinds.Master("10.0.0.1", 29400, is_host=False)


class SimulatedConnection:
    """The node's end of a stream to a master, as `transport.connection.Connection`."""

    def __init__(self, node: Node, masters: Masters) -> None:
        master = masters.find()
        if master is None:
            raise ConnectionLost("nothing listens there")
        self.stream = Stream(node.timeline, node.link, node.place.weather)
        self._inbox = Inbox(node)
        self.stream.listen(TO_NODE, node, self._inbox.put)
        master.accept(self.stream)

    async def send(self, data: bytes) -> None:
        self.stream.send(TO_MASTER, data)

    async def receive(self) -> bytes:
        return await self._inbox.get()

    async def finish(self) -> None:
        self.stream.finish(TO_MASTER)

    async def close(self) -> None:
        self.stream.close(TO_MASTER)


class WatchedMasterClient(WatchedClient, MasterClient):
    """The master client of the product, with checks of the invariants."""


class ClientOfMaster(NodeClient):
    """The client of a node of a job with a master."""

    def __init__(self, node: Node, spec: JobSpec, on_change: Callable[[], None], masters: Masters) -> None:
        super().__init__(node)
        self._masters = masters
        # That of the node, and those of an operator on its machine.
        self._streams: list[Stream] = []
        spec = replace(spec, rendezvous=SPEC)
        random = node.timeline.random.random
        self.client = WatchedMasterClient(
            node, spec, on_change, node.note, connect=self._connect, rng=random, reaches=node.reaches
        )

    def break_off(self, silent: bool) -> None:
        reset = bool(self._streams) and self._node.timeline.random.random() < 0.3
        for stream in self._streams:
            stream.close(TO_MASTER, silent=silent, reset=reset)

    def cut(self) -> None:
        for stream in self._streams:
            stream.cut()

    def _connect(self, spec: kinds.Master, addresses: Sequence[Address]) -> SimulatedConnection:
        connection = SimulatedConnection(self._node, self._masters)
        self._streams.append(connection.stream)
        return connection
