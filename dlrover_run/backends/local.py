"""Records that live in this process: one node that needs no one else, and `static`, where flags say who the others
are."""

from __future__ import annotations

from collections.abc import Callable

from dlrover_run.coordination.decide import Rules, decide
from dlrover_run.coordination.records import NodePhase, NodeStatus, Plan
from dlrover_run.spec import JobSpec

PlanListener = Callable[[Plan], None]


class LocalBoard:
    """Takes this node's status and tells it the plan, with `decide` run on the spot.

    With `static` nothing is ever heard of the other nodes, exactly as in torchrun: their statuses are made up from the
    flags, they count as always having done what this node has done, and each node of the job decides on its own.
    """

    def __init__(self, spec: JobSpec, listener: PlanListener) -> None:
        self._rules = rules_of(spec)
        self._node_rank = spec.node_rank
        self._listener = listener
        self.plan = Plan()

    def publish(self, status: NodeStatus) -> None:
        """Put this node's latest status on the board; the listener hears of the plan when that changed it."""
        plan = decide(self._rules, self.plan, self._with_peers(status))
        if plan != self.plan:
            self.plan = plan
            self._listener(plan)

    def _with_peers(self, status: NodeStatus) -> list[NodeStatus]:
        def peer(rank: int) -> NodeStatus:
            phase = NodePhase.SUCCEEDED if status.phase is NodePhase.SUCCEEDED else NodePhase.RUNNING
            return NodeStatus(
                node_id=f"static-{rank}",
                incarnation="",
                address="",
                port=0,
                workers=status.workers,
                phase=phase,
                round=status.round,
            )

        return [status if rank == self._node_rank else peer(rank) for rank in range(self._rules.nodes)]


def rules_of(spec: JobSpec) -> Rules:
    """The rules of coordination that a job's flags fix."""
    store = (spec.master_addr, spec.master_port) if spec.backend == "static" else None
    return Rules(nodes=spec.nodes, max_restarts=spec.max_restarts, store=store)
