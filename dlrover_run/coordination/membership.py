"""What the coordinator knows of one node: its latest report, since when, and whether its connection holds."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.round import NodeKey, RoundKey

_DRAINING = frozenset({NodePhase.LEAVING, NodePhase.LEFT})


class MemberState(msgspec.Struct, frozen=True):
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


Members = Mapping[NodeKey, MemberState]


def all_have_left(members: Members, now: float) -> bool:
    """Whether the last nodes that were here have left by request, so that no node is expected back.

    A node that was not yet declared lost when the last of them left was lost at the same time. It is waited for, as it
    would be if it had been lost just after the others left: the result of the job must not depend on the order.
    """
    left: list[MemberState] = []
    lost: list[MemberState] = []
    for state in members.values():
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
