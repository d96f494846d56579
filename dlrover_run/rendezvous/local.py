"""The client whose coordinator runs in this process: for one node, and for `static`, where flags give the ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import msgspec

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.model import Assignment, NodePhase, NodeReport
from dlrover_run.coordination.rules import CHECK_NEVER, JobRules
from dlrover_run.policies.health.model import HealthStatus
from dlrover_run.rendezvous.client import OnChange


class LocalClient:
    """Takes this node's status and lets a coordinator of its own decide at once.

    With `static` (`node_rank` is given) nothing is ever received from the other nodes, exactly as in torchrun. Their
    statuses are made up: they count as doing what this node does, and each node of the job decides by itself. `say`
    prints one line to the console.
    """

    problem: str | None = None
    is_user_error = False

    def __init__(
        self,
        rules: JobRules,
        node_rank: int | None,
        on_change: OnChange,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        # Nodes that are made up cannot be checked.
        self._rules = rules if node_rank is None else replace(rules, check=CHECK_NEVER)
        self._say = say
        self._node_rank = node_rank
        self._on_change = on_change
        self._coordinator: Coordinator | None = None
        self._status: NodeReport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.assignment = Assignment()

    @property
    def pids(self) -> set[int]:
        """No process."""
        return set()

    def report(self, status: NodeReport) -> None:
        """Report this node's latest status; `on_change` is called if that changes the assignment."""
        if self._timer is not None and status == self._status:
            # During a check the assignment says how many seconds are left, which differ each time it is built.
            return
        self._status = status
        self._decide(status)

    async def close(self) -> None:
        """Cancel the timer of the next decision."""
        self._cancel_timer()

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
        self._cancel_timer()
        view = coordinator.view(status.key)
        waits = (self._rules.check != CHECK_NEVER or self._rules.cluster is not None) and view.waits
        # Running workers are waited for without a limit; processes of a parameter-server cluster have many deadlines.
        timed = waits or self._rules.cluster is not None
        if timed and (due := coordinator.wake_at()) is not None:
            self._timer = loop.call_at(due, self._decide, status)
        wanted = coordinator.assignment(status.key, coordinator.waiting(now) if waits else None)
        passed = wanted.health is not None and wanted.health.status is HealthStatus.PASSED
        for line in lines:
            # A node that passes prints one line of its own. The other lines are for people who compare nodes.
            if not passed or line.startswith("warning: "):
                self._say(line)
        if wanted != self.assignment:
            self.assignment = wanted
            self._on_change()

    def _cancel_timer(self) -> None:
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
