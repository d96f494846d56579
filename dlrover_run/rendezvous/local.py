"""Records that live in this process: one node that needs no one else, and `static`, where flags say who the others
are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import msgspec

from dlrover_run.coordination.check_records import HealthStatus
from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.records import Assignment, NodePhase, NodeReport
from dlrover_run.coordination.rules import CHECK_NEVER, JobRules
from dlrover_run.rendezvous.client import OnChange


class LocalClient:
    """Takes this node's status and has a coordinator of its own decide on the spot.

    With `static` (`node_rank` is given) nothing is ever heard of the other nodes, exactly as in torchrun: their
    statuses are made up, they count as always having done what this node has done, and each node of the job decides on
    its own. `say` prints one line for the person at the console.
    """

    problem: str | None = None
    is_user_error = False

    def __init__(
        self, rules: JobRules, node_rank: int | None, listener: OnChange, say: Callable[[str], None] = lambda line: None
    ) -> None:
        # Nothing can be asked of nodes that are made up.
        self._rules = rules if node_rank is None else replace(rules, check=CHECK_NEVER)
        self._say = say
        self._node_rank = node_rank
        self._listener = listener
        self._coordinator: Coordinator | None = None
        self._status: NodeReport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.assignment = Assignment()

    @property
    def pids(self) -> set[int]:
        """Nobody."""
        return set()

    def report(self, status: NodeReport) -> None:
        """Put this node's latest status on the board; the listener hears when that changed what it shall do."""
        if self._timer is not None and status == self._status:
            # While a check goes on, what is waited for has another number of seconds each time that one looks.
            return
        self._status = status
        self._decide(status)

    async def close(self) -> None:
        """There is nothing to let go of but the next look at the time."""
        self._rest()

    def _decide(self, status: NodeReport) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._coordinator is None:
            self._coordinator = Coordinator(self._rules, now)
        coordinator = self._coordinator
        for one in self._with_peers(status):
            coordinator.receive(one, now)
        while coordinator.advance(now):
            pass
        lines = coordinator.take_log_lines()
        self._rest()
        part = coordinator.view(status.key)
        waits = (self._rules.check != CHECK_NEVER or self._rules.cluster is not None) and part.waits
        # Workers who train are waited for without a limit; processes of a cluster have deadlines of many kinds.
        timed = waits or self._rules.cluster is not None
        if timed and (due := coordinator.wake_at()) is not None:
            self._timer = loop.call_at(due, self._decide, status)
        wanted = coordinator.assignment(status.key, coordinator.waiting(now) if waits else None)
        passed = wanted.health is not None and wanted.health.status is HealthStatus.PASSED
        for line in lines:
            # A node that passes says so in one line of its own: those that others grep for compare nodes.
            if not passed or line.startswith("warning: "):
                self._say(line)
        if wanted != self.assignment:
            self.assignment = wanted
            self._listener()

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _with_peers(self, status: NodeReport) -> list[NodeReport]:
        if self._node_rank is None:
            return [status]
        own_rank = self._node_rank
        coordinator = self._coordinator
        assert coordinator is not None

        def peer(rank: int) -> NodeReport:
            phase = NodePhase.RUNNING if status.phase is NodePhase.FAILED else status.phase
            made_up = msgspec.structs.replace(
                status, node_id=f"static-{rank}", incarnation="x", preferred_rank=rank, phase=phase, failure=None
            )
            seat = status.ranks and coordinator.ranks(made_up.key)
            return msgspec.structs.replace(made_up, ranks=seat)

        own = msgspec.structs.replace(status, preferred_rank=own_rank)
        return [own if rank == own_rank else peer(rank) for rank in range(self._rules.max_nodes)]
