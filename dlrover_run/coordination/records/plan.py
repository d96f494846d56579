"""The plan: what the whole job is to do. Only the coordinator writes it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING

import msgspec

from dlrover_run.coordination.records.parts import Part, check_parts
from dlrover_run.coordination.records.round import (
    Failure,
    Member,
    NodeKey,
    PlannedChange,
    RoundKey,
)
from dlrover_run.coordination.records.rules import DesiredSize
from dlrover_run.words.reasons import BoundedReasons, Code, Reasons, render

if TYPE_CHECKING:
    from dlrover_run.coordination.records.size_choice import SizeChoice


class PlanPhase(enum.StrEnum):
    """What the whole job is doing."""

    GATHERING = "gathering"
    TRAINING = "training"
    FINISHED = "finished"
    FAILED = "failed"


OVER = frozenset({PlanPhase.FINISHED, PlanPhase.FAILED})


class PlanPart(Part):
    """The part of `Plan`."""

    __slots__ = ()

    @property
    def wanted_nodes(self) -> int:
        """How many nodes the feature wants a round to have, 0 for as many as the job may have."""
        return 0

    @property
    def size_choice(self) -> SizeChoice | None:
        """What the feature wants and why, if it chooses the number of nodes."""
        return None

    @property
    def has_held(self) -> bool:
        """Whether the feature has held a round of this job before, so that there were enough nodes already."""
        return False

    def expected(self) -> Sequence[Member]:
        """Nodes without ranks that a successor of the coordinator waits for."""
        return ()

    def has_removed(self, nodes: Container[NodeKey]) -> bool:
        """Whether the feature has removed one of these nodes."""
        return False

    @property
    def exchanged(self) -> tuple[NodeKey, ...]:
        """Two members of the last round that exchange their ranks in the next one; empty for none."""
        return ()

    @property
    def round_note(self) -> Reasons:
        """What the feature has changed for the next round, for people; it follows the reason of the round."""
        return ()

    @property
    def ends_job(self) -> Reasons:
        """Why the failure that has ended the last round is the last one of the job; empty if it is not."""
        return ()

    def refuses(self, node: NodeKey) -> bool:
        """Whether that node may have no ranks any more. The feature also assigns to it to leave."""
        return False

    def at_end(self) -> PlanPart:
        """The part in the plan of a job that is over."""
        return self

    def excuse_failure(self, plan: Plan) -> Reasons:
        """Why a failure of a worker ends the round of this plan without a charge: the feature has caused it, or holds
        the next round until a person has acted. Empty if it is charged. The feature must limit how often. Called once
        for each failure that ends a round."""
        return ()

    def why_over(self, plan: Plan) -> Reasons:
        """Why the last round is over, without a charge, and the next one may begin, whatever else would hold it. Empty
        as long as the feature requests nothing, and for the round that follows. Called in each decision."""
        return ()

    def why_held(self, plan: Plan) -> Reasons:
        """What the job waits for between two rounds although there are enough nodes, without a limit; empty if the
        feature waits for nothing. Called in each decision between two rounds."""
        return ()

    def why_not_finished(self, plan: Plan) -> Reasons:
        """Why the job goes on though all workers of its round have succeeded; empty if it is finished then."""
        return ()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the whole job should do now; only the coordinator writes it.

    Times are *job time*: seconds that coordinators of this job have counted, each going on from `clock`, the moment at
    which the last plan of its predecessor was written. `epoch` is the coordinator that wrote the plan, `key` the latest
    round, `members` its nodes in the order of their ranks; while GATHERING those of the last round, whose ranks are
    kept for them. `since` is when the phase began. `restart_count` failures were answered with a new round, at the
    times `restart_times`. `early_failures` rounds in succession failed before any worker made progress. `failure` is
    what ended the last round, if a worker did. `reasons` are the codes of why the plan is as it is. `parts` are
    the states of the job's features. `draining` are nodes that an operator has asked to leave, `to_drain` those that
    are to leave with the planned change. `saves` is set once a worker of the job has marked a checkpoint. `change` is
    the planned change that waits for the next one. `desired` is the size that an operator has asked for. `quorum` is
    how many of `members`, or of all nodes if no members are known, have to be here before the next round, 0 for any
    number: after a succession the others may still have the old master.
    """

    epoch: int = 0
    clock: float = 0.0
    phase: PlanPhase = PlanPhase.GATHERING
    since: float = 0.0
    key: RoundKey = RoundKey()
    members: tuple[Member, ...] = ()
    store_address: str = ""
    store_port: int = 0
    restart_count: int = 0
    restart_times: tuple[float, ...] = ()
    early_failures: int = 0
    failure: Failure | None = None
    reasons: BoundedReasons = (Code.NO_REPORT_YET(),)
    parts: tuple[PlanPart, ...] = ()
    draining: tuple[NodeKey, ...] = ()
    to_drain: tuple[NodeKey, ...] = ()
    saves: bool = False
    change: PlannedChange | None = None
    desired: DesiredSize | None = None
    quorum: int = 0

    def __post_init__(self) -> None:
        check_parts(self.parts)

    @property
    def reason(self) -> str:
        return render(self.reasons)

    def first_reasons(self, ask: Callable[[PlanPart], Reasons]) -> Reasons:
        """What the first feature that has something to say answers; empty if none has."""
        return next(filter(None, map(ask, self.parts)), ())

    @property
    def wanted_nodes(self) -> int:
        """The fewest nodes that a feature wants a round to have, 0 for as many as may be. A size that an operator has
        fixed takes precedence."""
        if self.desired is not None and self.desired.fixed:
            return 0
        return min((part.wanted_nodes for part in self.parts if part.wanted_nodes), default=0)

    @property
    def size_choice(self) -> SizeChoice | None:
        """What the feature that chooses the number of nodes wants, and why; None in a job without one."""
        return next((choice for part in self.parts if (choice := part.size_choice) is not None), None)
