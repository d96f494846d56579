"""The store of each round at MASTER_ADDR:MASTER_PORT: served by the agent of rank 0 as torchrun's does, unless the user
has rank 0 host it."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dlrover_run.background import TimeLimit
from dlrover_run.coordination.records.round import RankAssignment, RoundKey
from dlrover_run.processes.ports import HeldPort
from dlrover_run.workers.environment import serves_store

OTHER_NODES_TIMEOUT = 300.0
"""Seconds after the success of this node's workers in which the other nodes of a `static` job may use the store. As
`exit_barrier_timeout` of torchrun's agent."""

END_REPORT_TIMEOUT = 3.0
"""Seconds for reporting the end of a node's workers to the store of a `static` job."""

if TYPE_CHECKING:
    from dlrover_run.workers.store_process import StoreProcess


class StorePort:
    """The port of a round's store. `store` is None if the port is only held, for rank 0, which hosts the store."""

    def __init__(self, held: HeldPort, store: StoreProcess | None = None) -> None:
        self._held = held
        self.store = store

    @property
    def pids(self) -> set[int]:
        """The pid of the store, while it runs."""
        return set() if self.store is None else self.store.pids

    def release(self) -> None:
        """End the store, and release the port. Idempotent."""
        if self.store is not None:
            self.store.release()
        self._held.release()


class RoundStores:
    """Opens the store of each round: a fresh one, so that workers of two rounds cannot meet.

    The agents of a `static` job do not communicate. There each node reports to the store that its workers have ended,
    so that the node that serves it knows when no other one needs it.

    `environment` is that of the launcher, `log` is called with a sentence for the user, and `on_client` with the round
    and the address of the first client of its store.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        log: Callable[[str], None],
        on_client: Callable[[RoundKey, str], None],
    ) -> None:
        self._serves = serves_store(environment)
        self._log = log
        self._on_client = on_client
        self._last: StoreProcess | None = None
        self._ended_nodes: set[int] = set()
        self._changed = asyncio.Event()
        self._waits = True

    def open(self, held: HeldPort | None, ranks: RankAssignment) -> StorePort | None:
        """Serve the store of a round at the port `held`, or leave that to rank 0; None on a node without the store.
        Raises OSError if another process listens there."""
        if held is None:
            return None
        if not self._serves:
            return StorePort(held)
        # Imported only here: of several nodes one serves the store.
        from dlrover_run.workers.store_process import StoreProcess

        def note_end(how: str) -> None:
            self._log(f"the store of round {ranks.round} {how}: workers that still need it fail")
            self._changed.set()

        def note_node(rank: int) -> None:
            if 0 < rank < ranks.nodes:
                self._ended_nodes.add(rank)
                self._changed.set()

        store = StoreProcess(held, self._log, note_end, lambda address: self._on_client(ranks.key, address), note_node)
        store.listen()
        if self._last is not None and self._last.used:
            # The same script will need it again: so it is not waited for.
            store.start()
        self._last = store
        return StorePort(held, store)

    async def end_static(self, ranks: RankAssignment, succeeded: bool) -> None:
        """For the end of the workers of a node of a `static` job. The node that serves the store keeps it, after a
        success, until the other nodes have reported this, OTHER_NODES_TIMEOUT at most; the others report it. After
        `stop_waiting` it returns at once."""
        if ranks.nodes == 1 or not self._serves or not self._waits:
            return
        if ranks.node_rank > 0:
            await self._report_end(ranks)
        elif succeeded and self._last is not None and self._last.used:
            await self._until_others_end(self._last, ranks.nodes)

    def stop_waiting(self) -> None:
        """Have `end_static` return."""
        self._waits = False
        self._changed.set()

    async def _until_others_end(self, store: StoreProcess, nodes: int) -> None:
        def awaited() -> list[int]:
            return [rank for rank in range(1, nodes) if rank not in self._ended_nodes]

        with contextlib.suppress(TimeoutError):
            async with TimeLimit(OTHER_NODES_TIMEOUT):
                logged = False
                while self._waits and store.pids and (ranks := awaited()):
                    if not logged:
                        logged = True
                        self._log(
                            f"the workers of this node have succeeded; it serves the store for {_name(ranks)} for "
                            f"{OTHER_NODES_TIMEOUT:g} s at most"
                        )
                    self._changed.clear()
                    await self._changed.wait()
                return
        self._log(
            f"warning: within {OTHER_NODES_TIMEOUT:g} s {_name(awaited())} did not report the end of workers: the "
            "store ends"
        )

    async def _report_end(self, ranks: RankAssignment) -> None:
        # Imported only here: other jobs do not need it.
        from dlrover_run.workers.tcp_store.parser import MAX_NODE_RANK, NODE_ENDED, VALIDATE

        # A node that serves no store any more needs no report.
        with contextlib.suppress(OSError, TimeoutError):
            async with TimeLimit(END_REPORT_TIMEOUT):
                reader, writer = await asyncio.open_connection(ranks.store_address, ranks.store_port)
                try:
                    writer.write(struct.pack("<BI", VALIDATE, NODE_ENDED | min(ranks.node_rank, MAX_NODE_RANK)))
                    await reader.read()
                finally:
                    writer.close()


def _name(ranks: list[int]) -> str:
    return f"node {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} nodes"
