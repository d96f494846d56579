"""How this node stands in the job: who it is, which seat it has taken, and the ports that it holds for stores."""

from __future__ import annotations

import os
import uuid

from dlrover_run.agent.host import told_name
from dlrover_run.coordination.records import OVER, Assignment, Failure, NodePhase, NodeStatus, RoundKey, Seat
from dlrover_run.spec import JobSpec, SpecError
from dlrover_run.supervisor.ports import HeldPort


class Standing:
    """Takes seats and says what this node has to say. One port is always held for a round to come.

    `host` is what this node is called.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self.host = told_name(spec)
        self._incarnation = uuid.uuid4().hex
        self._node_id = spec.node_id or f"{os.getpid()}-{self._incarnation[:12]}"
        self._next_port = HeldPort()
        self._port: HeldPort | None = None
        self._heard = RoundKey()
        self._epoch = 0
        self._restart_count = 0
        self.seat: Seat | None = None
        self.ended_by = ""
        """The name of the signal for which this node leaves."""

    @property
    def round(self) -> RoundKey | None:
        """The round in which this node has a seat."""
        return None if self.seat is None else self.seat.key

    def take(self, wanted: Assignment) -> None:
        """Take what the coordinator wants of this node, at once: the port of a round that is formed is not on offer
        any more, even while the workers of the last round are still ending.

        After each word of another round, or of another coordinator, another port is on offer: a round that this node
        never heard of may have used the last one.
        """
        is_news = (wanted.key, wanted.epoch) != (self._heard, self._epoch)
        self._heard = wanted.key
        self._epoch = wanted.epoch
        self._restart_count = wanted.restart_count
        if wanted.phase in OVER:
            # What is still to be said of a job that is over is said of its last round.
            return
        seat = wanted.seat
        if seat is None or seat.key != self.round:
            self._release()
            if seat is not None and seat.node_rank == 0 and seat.store_port == self._next_port.number:
                self._port, self._next_port = self._next_port, HeldPort()
                is_news = False
        # Else it is the same place, perhaps told by another coordinator.
        self.seat = seat
        if is_news:
            self._next_port.release()
            self._next_port = HeldPort()

    def take_port(self) -> HeldPort | None:
        """The store's port for the round that starts, held; None where it is another node's business.

        Raises SpecError when a port that flags name cannot be had on this host.
        """
        port, self._port = self._port, None
        if port is not None or self.seat is None or self.seat.node_rank != 0:
            return port
        try:
            return HeldPort(self.seat.store_port)
        except OSError as error:
            raise SpecError(
                f"--master-port: port {self.seat.store_port} cannot be had on this host ({error.strerror}); "
                "name another one."
            ) from None

    def status(self, phase: NodePhase, failure: Failure | None = None, met: bool = False) -> NodeStatus:
        """What this node says of itself."""
        return NodeStatus(
            node_id=self._node_id,
            incarnation=self._incarnation,
            host=self.host,
            address=self._spec.local_addr or "127.0.0.1",
            port=self._next_port.number,
            workers=self._spec.workers_per_node,
            role=self._spec.role[:255],
            rank_wish=self._spec.node_rank,
            phase=phase,
            seat=self.seat,
            heard=self._heard,
            epoch=self._epoch,
            restart_count=self._restart_count,
            met=met,
            failure=failure,
            ended_by=self.ended_by if phase in (NodePhase.LEAVING, NodePhase.LEFT) else "",
        )

    def close(self) -> None:
        """Let go of the ports."""
        self._release()
        self._next_port.release()

    def _release(self) -> None:
        if self._port is not None:
            self._port.release()
            self._port = None
