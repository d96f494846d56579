"""A node's client of a master: the product's `MasterClient`, over a connection of the simulated network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dlrover_run.coordination.model import Assignment, NodeReport
from dlrover_run.rendezvous.master_client import MasterClient
from dlrover_run.spec import JobSpec, MasterSpec
from dlrover_run.transport.addresses import Address
from dlrover_run.transport.connection import ConnectionLost
from simulation.masters import Inbox, Masters
from simulation.network import TO_MASTER, TO_NODE, Stream
from simulation.nodes import Node, ReachWatch
from simulation.timeline import demand, demand_no_internal_error

SPEC = MasterSpec("10.0.0.1", 29400, is_host=False)

LEAVING = 5.0
"""Seconds in which an agent that leaves has ended, with a master that answers or without one."""


class SimulatedConnection:
    """The node's side of a stream to a master, as `transport.connection.Connection`."""

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


class WatchedClient(ReachWatch, MasterClient):
    """The product's client, with the laws around the assignments that it receives."""

    def __init__(self, node: Node, *given: Any, **more: Any) -> None:
        self._node = node
        super().__init__(*given, **more)

    def _take(self, assignment: Assignment) -> None:
        if assignment.epoch >= self._assignments.epoch:
            self._node.place.laws.hearing(self._node.key, assignment)
        super()._take(assignment)


class ClientOfMaster:
    """A client as a simulated agent sees it."""

    def __init__(self, node: Node, spec: JobSpec, on_change: Callable[[], None], masters: Masters) -> None:
        self._node = node
        self._masters = masters
        self._stream: Stream | None = None
        spec = replace(spec, backend="master", master=SPEC)
        random = node.timeline.random.random
        self._client = WatchedClient(
            node, spec, on_change, node.note, connect=self._connect, rng=random, reaches=node.reaches
        )

    @property
    def assignment(self) -> Assignment:
        return self._client.assignment

    @property
    def problem(self) -> str | None:
        problem = self._client.problem
        demand_no_internal_error(problem)
        return problem

    @property
    def may_give_up(self) -> bool:
        return self._client._cut_off_watch is not None

    def report(self, status: NodeReport) -> None:
        self._client.report(status)

    def close(self, on_closed: Callable[[], None]) -> None:
        self._node.create_task(self._client.close()).add_done_callback(lambda _: on_closed())
        # A process that was stopped meanwhile gets the time for what arrived meanwhile.
        self._node.call_later(LEAVING, self._node.call_later, 1.0, self._demand_end)

    def break_off(self, silent: bool) -> None:
        """The process is gone; its kernel closes the connection, unless the machine is gone too."""
        if self._stream is not None:
            self._stream.close(TO_MASTER, silent=silent, reset=self._node.timeline.random.random() < 0.3)

    def cut(self) -> None:
        """The connection breaks, for both ends."""
        if self._stream is not None:
            self._stream.cut()

    def _connect(self, spec: MasterSpec, addresses: Sequence[Address]) -> SimulatedConnection:
        connection = SimulatedConnection(self._node, self._masters)
        self._stream = connection.stream
        return connection

    def _demand_end(self) -> None:
        demand(not self._node.alive, "an agent that leaves ends in a bounded time")
