"""What nodes report of workers that outlive their round, and what the coordinator sends them for the next group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from dlrover_run.coordination.records.assignment import AssignmentPart
from dlrover_run.coordination.records.bounds import (
    Count,
    Name,
    NodeId,
    Port,
    Seconds,
)
from dlrover_run.coordination.records.plan import PlanPart
from dlrover_run.coordination.records.report import ReportPart
from dlrover_run.coordination.records.round import NodeKey, RoundKey
from dlrover_run.words.reasons import BoundedReasons

if TYPE_CHECKING:
    from dlrover_run.coordination.records.plan import Plan
    from dlrover_run.coordination.records.report import NodeReport

MAX_GROUP = 1024
"""Workers of a group that is formed in place. Each of them receives the handles of all, so the size of what is sent
grows with the square of their number; a larger round is formed as without this feature."""

NUMBER_BITS = 21
"""Bits of a uuid that hold the number of the round."""

MAX_UUID = 2**63 - 1

# torch reads a handle; here it is a text without control characters.
Handle = Annotated[str, Meta(min_length=1, max_length=255, pattern=r"\A[^\x00-\x1f\x7f]+\Z")]
Handles = Annotated[tuple[Handle, ...], Meta(max_length=MAX_GROUP)]
Uuid = Annotated[int, Meta(ge=0, le=MAX_UUID)]


def uuid_of(key: RoundKey) -> int | None:
    """The uuid of the group of that round; None if it has no room for the numbers of the round.

    A round is formed once, and a group is formed in place once in a round, so no uuid is ever used again. Nothing has
    to be counted, and nothing is forgotten with a coordinator.
    """
    if not (0 < key.number < 1 << NUMBER_BITS and 0 <= key.epoch < 1 << (63 - NUMBER_BITS)):
        return None
    return key.epoch << NUMBER_BITS | key.number


class Store(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The store by which groups are formed in place, and the node whose agent runs it beside its workers. A node never
    offers the same port twice, so an equal record is the same store."""

    node_id: NodeId
    incarnation: NodeId
    address: Name
    port: Port

    @property
    def node(self) -> NodeKey:
        return NodeKey(self.node_id, self.incarnation)


class SurvivorsReport(msgspec.Struct, ReportPart, frozen=True, forbid_unknown_fields=True, tag="survivors"):
    """The workers of the node in the round `key`.

    `handles` are those that they have offered for this round, in the order of their ranks: of all of them, or of none
    yet. `kept` of them run since an earlier round. `unable` says why one of them cannot take part in a group that is
    formed in place; it is empty if each can, as far as is known. `formed` is set once all of them are in the group.
    `port` is that of the store which the node runs, or could run; another one once that has ended.
    `store` is that of the round, for a coordinator that has lost its records.
    """

    key: RoundKey = RoundKey()
    handles: Handles = ()
    kept: Count = 0
    unable: BoundedReasons = ()
    formed: bool = False
    port: Port = 0
    store: Store | None = None

    def problem(self, report: NodeReport, plan: Plan) -> str | None:
        if not self.port:
            return f"{report.host} reports no port for the store of its workers"
        if self.handles and (len(self.handles) != report.workers or len(set(self.handles)) != report.workers):
            return f"{report.host} reports {len(self.handles)} handles of {report.workers} workers"
        return None


class Formation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the workers of the round `key` form their process group: in place, by `uuid` and the handles in the order of
    the ranks; or with uuid 0 as without this feature, by the store of the round and with new processes."""

    key: RoundKey
    uuid: Uuid = 0
    handles: Handles = ()

    @property
    def in_place(self) -> bool:
        return self.uuid > 0


class SurvivorsState(msgspec.Struct, PlanPart, frozen=True, forbid_unknown_fields=True, tag="survivors"):
    """The store, None while no node has reported one, and the round for which it was chosen last, `chosen_for`; how the
    group of the round is formed, None while that is not known; and why the last group that was not formed in place was
    not."""

    store: Store | None = None
    chosen_for: RoundKey = RoundKey()
    formation: Formation | None = None
    why_not: BoundedReasons = ()


class SurvivorsAssignment(msgspec.Struct, AssignmentPart, frozen=True, forbid_unknown_fields=True, tag="survivors"):
    """How the workers of the round `key` find each other, alike for all nodes. `formation` is None until all of them
    have offered their handles. `timeout` is the rule `reconfigure_timeout`, and `start_timeout` the one of that name.
    """

    key: RoundKey = RoundKey()
    store: Store | None = None
    formation: Formation | None = None
    timeout: Seconds = 0.0
    start_timeout: Seconds = 0.0

    @property
    def own_formation(self) -> Formation | None:
        """How the group of this round is formed, None while that is not known: one of another round is no news."""
        return self.formation if self.formation is not None and self.formation.key == self.key else None

    def split(self) -> tuple[SurvivorsAssignment, SurvivorsAssignment]:
        return self, SurvivorsAssignment()

    def join(self, common: AssignmentPart) -> SurvivorsAssignment:
        return common if isinstance(common, SurvivorsAssignment) else self
