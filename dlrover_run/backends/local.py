"""Records that live in this process: one node that needs no one else, and `static`, where flags say who the others
are."""

from __future__ import annotations

import asyncio

import msgspec

from dlrover_run.backends.board import Listener
from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.records import Assignment, NodePhase, NodeStatus
from dlrover_run.coordination.rules import Rules


class LocalBoard:
    """Takes this node's status and has a coordinator of its own decide on the spot.

    With `static` (`node_rank` is given) nothing is ever heard of the other nodes, exactly as in torchrun: their
    statuses are made up, they count as always having done what this node has done, and each node of the job decides on
    its own.
    """

    problem: str | None = None
    mistaken = False

    def __init__(self, rules: Rules, node_rank: int | None, listener: Listener) -> None:
        self._rules = rules
        self._node_rank = node_rank
        self._listener = listener
        self._coordinator: Coordinator | None = None
        self.assignment = Assignment()

    @property
    def pids(self) -> set[int]:
        """Nobody."""
        return set()

    def publish(self, status: NodeStatus) -> None:
        """Put this node's latest status on the board; the listener hears when that changed what it shall do."""
        now = asyncio.get_running_loop().time()
        if self._coordinator is None:
            self._coordinator = Coordinator(self._rules, now)
        for one in self._with_peers(status):
            self._coordinator.hear(one, now)
        while self._coordinator.advance(now):
            pass
        wanted = self._coordinator.assignment(status.key)
        if wanted != self.assignment:
            self.assignment = wanted
            self._listener()

    async def close(self) -> None:
        """There is nothing to let go of."""

    def _with_peers(self, status: NodeStatus) -> list[NodeStatus]:
        if self._node_rank is None:
            return [status]
        own_rank = self._node_rank
        coordinator = self._coordinator
        assert coordinator is not None

        def peer(rank: int) -> NodeStatus:
            phase = NodePhase.RUNNING if status.phase is NodePhase.FAILED else status.phase
            made_up = msgspec.structs.replace(
                status, node_id=f"static-{rank}", incarnation="x", rank_wish=rank, phase=phase, failure=None
            )
            seat = status.seat and coordinator.seat(made_up.key)
            return msgspec.structs.replace(made_up, seat=seat)

        own = msgspec.structs.replace(status, rank_wish=own_rank)
        return [own if rank == own_rank else peer(rank) for rank in range(self._rules.most)]
