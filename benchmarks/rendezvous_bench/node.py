"""One simulated node, wherever the nodes of its job meet: it says what a real one says, and starts no workers."""

from __future__ import annotations

from dlrover_run.agent.node_state import NodeState
from dlrover_run.coordination.model import Assignment, NodePhase, NodeReport
from dlrover_run.coordination.rules import JobRules
from dlrover_run.spec import Entrypoint, JobSpec
from rendezvous_bench.crowd import Order, Tally

WORKERS = 8


class Node:
    """Node `number` of a job, which tells the tally where it has got to."""

    def __init__(self, order: Order, number: int, tally: Tally) -> None:
        self.spec = JobSpec(
            Entrypoint("program", "true"),
            run_id=order.job,
            workers_per_node=WORKERS,
            rules=JobRules(min_nodes=order.least, max_nodes=order.nodes, keep_alive_interval=order.interval),
            node_id=f"node{number}",
            local_addr="127.0.0.1",
        )
        self._tally = tally
        self._standing = NodeState(self.spec)
        self._heard = False

    @property
    def status(self) -> NodeReport:
        """What it says of itself now."""
        return self._standing.report(NodePhase.RUNNING if self._standing.seat else NodePhase.WAITING)

    def hear(self, wanted: Assignment) -> None:
        """Take what is wanted of it; a place that is new is counted as taken."""
        if not self._heard:
            self._heard = True
            self._tally.reach("heard")
        before = self._standing.round
        self._standing.accept(wanted)
        seat = self._standing.seat
        if seat is not None and seat.key != before:
            self._tally.reach("seated", seat.nodes)
