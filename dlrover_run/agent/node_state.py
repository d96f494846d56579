"""The state of this node in the job: its identity, the ranks that it has accepted, the ports held for stores."""

from __future__ import annotations

import os

from dlrover_run.agent.host import display_name
from dlrover_run.agent.result import NodeRefused
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.bounds import MAX_WHAT
from dlrover_run.coordination.records.plan import OVER
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.round import (
    Failure,
    NodeKey,
    RankAssignment,
    RoundKey,
)
from dlrover_run.exit_reasons import RETRY
from dlrover_run.processes.ports import HeldPort
from dlrover_run.processes.process import StuckProcess
from dlrover_run.spec import Entrypoint, JobSpec, SpecError


def _program(entrypoint: Entrypoint) -> str:
    """The name of what this node is to run, the same on all machines of a job."""
    target = entrypoint.target
    if entrypoint.kind == "module":
        return f"-m {target}"[:255]
    return (target if entrypoint.kind == "function" else os.path.basename(target))[:255]


class NodeState:
    """What this node reports of itself. One port is always held for the store of a future round.

    `host` is the name of this node in messages.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self.host = display_name(spec)
        self._incarnation = os.urandom(16).hex()
        self.node_id = spec.node_id or f"{os.getpid()}-{self._incarnation[:12]}"
        self._next_port = HeldPort()
        self._port: HeldPort | None = None
        self._assignment = Assignment()
        self.ranks: RankAssignment | None = None
        self.leave_signal = ""
        """The name of the signal because of which this node leaves."""

    @property
    def key(self) -> NodeKey:
        """The identity of this node."""
        return NodeKey(self.node_id, self._incarnation)

    @property
    def round(self) -> RoundKey | None:
        """The round in which this node has ranks."""
        return None if self.ranks is None else self.ranks.key

    def accept(self, assignment: Assignment) -> None:
        """Accept an assignment, immediately: the port of a formed round is not offered any more, even while the workers
        of the last round are still ending.

        After each assignment for another round, or by another coordinator, a new port is offered: a round of which this
        node received no assignment may have used the last one.
        """
        before, self._assignment = self._assignment, assignment
        is_news = (assignment.key, assignment.epoch) != (before.key, before.epoch)
        if assignment.phase in OVER:
            # Reports about a job that is over refer to its last round.
            return
        ranks = assignment.ranks
        if ranks is None or ranks.key != self.round:
            self._release()
            if ranks is not None and ranks.node_rank == 0 and ranks.store_port == self._next_port.number:
                self._port, self._next_port = self._next_port, HeldPort()
                is_news = False
        # Otherwise the ranks are the same, perhaps assigned by another coordinator.
        self.ranks = ranks
        if is_news:
            self._next_port.release()
            self._next_port = HeldPort()

    def take_port(self) -> HeldPort | None:
        """The held port of the store for the round that starts; None if another node hosts the store.

        Raises SpecError if a port given by a flag is not available on this host.
        """
        port, self._port = self._port, None
        if port is not None or self.ranks is None or self.ranks.node_rank != 0:
            return port
        try:
            return HeldPort(self.ranks.store_port)
        except OSError as error:
            raise SpecError(
                f"--master-port: port {self.ranks.store_port} cannot be had on this host ({error.strerror}); "
                "name another one."
            ) from None

    def report(self, phase: NodePhase, failure: Failure | None = None, progressed: bool = False) -> NodeReport:
        """A report of this node."""
        return NodeReport(
            node_id=self.node_id,
            incarnation=self._incarnation,
            host=self.host,
            address=self._spec.local_addr or "127.0.0.1",
            port=self._next_port.number,
            workers=self._spec.workers_per_node,
            role=self._spec.role[:255],
            program=_program(self._spec.entrypoint),
            preferred_rank=self._spec.node_rank,
            phase=phase,
            ranks=self.ranks,
            known_round=self._assignment.key,
            epoch=self._assignment.epoch,
            restart_count=self._assignment.restart_count,
            progressed=progressed,
            failure=failure,
            ended_by=self.leave_signal if phase in (NodePhase.LEAVING, NodePhase.LEFT) else "",
        )

    def close(self) -> None:
        """Release the ports."""
        self._release()
        self._next_port.release()

    def _release(self) -> None:
        if self._port is not None:
            self._port.release()
            self._port = None


def leave_report(state: NodeState, gave_up: Exception | None) -> NodeReport:
    """The report that this node has left; `gave_up` is the error that made it leave, if any."""
    ranks = state.ranks
    if gave_up is None or isinstance(gave_up, NodeRefused) or ranks is None:
        return state.report(NodePhase.LEFT)
    what = f"could not be {'stopped' if isinstance(gave_up, StuckProcess) else 'started'}: {gave_up}"
    # With its own exit code this node asks an operator for another attempt, unless its settings are wrong.
    status = 0 if isinstance(gave_up, SpecError) else RETRY
    failure = Failure(ranks.first_rank, state.host, what[:MAX_WHAT], exit_status=status)
    return state.report(NodePhase.LEFT, failure)
