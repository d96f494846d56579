"""What the coordinator knows of each node: its latest report, since when, and whether its connection holds."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.round import Member, NodeKey, RoundKey

_DRAINING = frozenset({NodePhase.LEAVING, NodePhase.LEFT})


class KnownNode(msgspec.Struct, frozen=True):
    """One node as the coordinator sees it. Times are job time.

    `joined_at` is when its first report was received, `changed_at` when its phase or ranks last changed.
    `disconnected_at` is when its connection ended, `lost_at` when it is declared lost unless it connects again; both
    are None while it is connected. `succeeded` is the last round of which it reported that all its workers had
    succeeded, whatever it reported later. `prepared_at` is when it last reported that it does not prepare any more,
    None for a node that has not prepared here.
    """

    report: NodeReport
    joined_at: float
    changed_at: float
    disconnected_at: float | None = None
    lost_at: float | None = None
    succeeded: RoundKey | None = None
    prepared_at: float | None = None

    @property
    def ready_at(self) -> float:
        """When a round could have taken it in first."""
        return self.joined_at if self.prepared_at is None else self.prepared_at

    def is_lost(self, now: float) -> bool:
        """Whether it has been without a connection for too long."""
        return self.lost_at is not None and now >= self.lost_at

    @property
    def connected(self) -> bool:
        return self.lost_at is None

    @property
    def is_draining(self) -> bool:
        """Whether it was asked to leave, or has left."""
        return self.report.phase in _DRAINING

    @property
    def has_left(self) -> bool:
        """Whether it has left on purpose; a leaving node whose connection has ended is not waited for."""
        # A decision asks every node for it, so it calls nothing.
        phase = self.report.phase
        return phase is NodePhase.LEFT or (self.lost_at is not None and phase in _DRAINING)

    @property
    def is_available(self) -> bool:
        """Whether it could have a rank in a round that is formed now."""
        return self.lost_at is None and self.report.phase not in _DRAINING

    def succeeded_in(self, key: RoundKey) -> bool:
        return self.succeeded == key


Nodes = Mapping[NodeKey, KnownNode]


class KnownNodes:
    """The nodes of a job, which a coordinator keeps. `states` has each by its key; only this class changes it.
    Times are job time."""

    def __init__(self) -> None:
        self.states: dict[NodeKey, KnownNode] = {}
        # The keys of the nodes by their node id, so that joining a large job costs no more than joining a small one.
        self._processes: dict[str, list[NodeKey]] = {}

    def refusal(self, key: NodeKey) -> str | None:
        """Why this process cannot be a node, or None; see `Coordinator.refusal`."""
        for other in self._processes.get(key.node_id, ()):
            state = self.states[other]
            if other != key and state.connected:
                return f"node id {key.node_id} is in use by another process, on {state.report.host}, that is alive"
        return None

    def take(self, report: NodeReport, time: float) -> None:
        """Take a node's latest report, which also shows that it is connected."""
        known = self.states.get(report.key)
        succeeded = succeeded_round(report, None if known is None else known.succeeded)
        if known is not None:
            same = (known.report.phase, known.report.ranks) == (report.phase, report.ranks)
            changed = known.changed_at if same else time
            prepared = time if known.report.preparing and not report.preparing else known.prepared_at
            self.states[report.key] = KnownNode(
                report, known.joined_at, changed, succeeded=succeeded, prepared_at=prepared
            )
            return
        for key in self._processes.get(report.node_id, ()):
            # Replaced by a new process with the same id, so this one is not waited for.
            state = self.states[key]
            disconnected = time if state.disconnected_at is None else state.disconnected_at
            self.states[key] = replace(state, disconnected_at=disconnected, lost_at=time)
        self._add(KnownNode(report, joined_at=time, changed_at=time, succeeded=succeeded))

    def expect(self, member: Member, clock: float, within: float, phase: NodePhase = NodePhase.RUNNING) -> None:
        """Wait that number of seconds for a node of a predecessor to connect. `clock` is the job time of its plan."""
        report = NodeReport(
            node_id=member.node_id,
            incarnation=member.incarnation,
            host=member.host,
            address="",
            port=0,
            workers=member.workers,
            phase=phase,
        )
        # Counted as disconnected before any later failure, so that a failure is not charged if this member is lost.
        lost_at = clock + within
        self._add(KnownNode(report, joined_at=clock, changed_at=clock, disconnected_at=-math.inf, lost_at=lost_at))

    def disconnect(self, key: NodeKey, time: float, lost_at: float) -> None:
        """The connection of a node has ended: it is declared lost then, unless it reconnects."""
        known = self.states.get(key)
        if known is not None and known.connected:
            self.states[key] = replace(known, disconnected_at=time, lost_at=lost_at)

    def forget(self, key: NodeKey) -> None:
        """A node is gone."""
        del self.states[key]
        self._processes[key.node_id].remove(key)
        if not self._processes[key.node_id]:
            del self._processes[key.node_id]

    def _add(self, newcomer: KnownNode) -> None:
        key = newcomer.report.key
        self.states[key] = newcomer
        self._processes.setdefault(key.node_id, []).append(key)


def all_have_left(nodes: Nodes, now: float) -> bool:
    """Whether the last nodes that were here have left by request, so that no node is expected back.

    A node that was not yet declared lost when the last of them left was lost at the same time. It is waited for, as it
    would be if it had been lost just after the others left: the result of the job must not depend on the order.
    """
    left: list[KnownNode] = []
    lost: list[KnownNode] = []
    for state in nodes.values():
        if state.has_left:
            left.append(state)
        elif state.is_lost(now):
            lost.append(state)
        else:
            return False
    if not left:
        return False
    last_left = max(
        state.changed_at
        if state.disconnected_at is None or state.report.phase is NodePhase.LEFT
        else state.disconnected_at
        for state in left
    )
    return all(state.lost_at is not None and state.lost_at <= last_left for state in lost)


def succeeded_round(report: NodeReport, before: RoundKey | None) -> RoundKey | None:
    """The last round in which all workers of a node have succeeded; `before` is what was known of that."""
    return report.ranks.key if report.phase is NodePhase.SUCCEEDED and report.ranks is not None else before
