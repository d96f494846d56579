"""What is known of the failures of a job: a record of each round that failed, and of what it can follow."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from dlrover_run.coordination.records.assignment import AssignmentPart, Dismissal
from dlrover_run.coordination.records.bounds import MAX_WORKERS, Count, Name, NodeId, Seconds, Total
from dlrover_run.coordination.records.plan import PlanPart
from dlrover_run.coordination.records.report import ReportPart
from dlrover_run.coordination.records.round import NodeKey, RoundKey
from dlrover_run.exit_reasons import ExitReason
from dlrover_run.features.experiments.kinds import Kind
from dlrover_run.words.reasons import BoundedReasons, Reasons, render

MAX_TRIALS = 32
"""Rounds of a job that are remembered: no verdict takes half as many."""

AT_ONCE = 3
"""Steps of a round within which a failure comes at once, so that all that happens at a start has the same step."""

Device = Annotated[str, Meta(max_length=80, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]


class Alike(enum.StrEnum):
    """Which workers failed in the same way in one round."""

    ONE = "one"
    NODE = "node"
    """Several, all on one node as far as is known."""
    NODES = "nodes"
    """Workers of several nodes."""


class Trial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A round that a failure of this kind ended, and where the first worker failed: its rank, its node and its device,
    which is empty where a worker has none of its own.

    `workers` are those of the round, `local` those of the node. `depth` is how many steps the worker had made in the
    round, None if it reports none; `resumed` the checkpoint from which it began, None if that is not known. `alike` is
    None as long as not all of its workers have ended, and `at` the job time of the failure.
    """

    round: Total
    kind: Kind
    rank: Total
    local_rank: Count
    node: NodeId
    host: Name
    device: Device = ""
    workers: Total = 1
    local: Count = 1
    alike: Alike | None = None
    at: Seconds = 0.0
    depth: Total | None = None
    resumed: Total | None = None

    @property
    def step(self) -> int | None:
        """The step at which it failed, counted from that of its checkpoint; None if it reports no steps."""
        return None if self.depth is None else self.depth + (self.resumed or 0)

    @property
    def at_once(self) -> bool:
        return self.depth is None or self.depth <= AT_ONCE


class Passed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A round that came further than the failure of this kind before it, from the checkpoint `resumed`."""

    round: Total
    kind: Kind
    resumed: Total | None = None


class Cause(enum.StrEnum):
    """What a failure may follow."""

    GPU = "gpu"
    NODE = "node"
    RANK = "rank"
    CHECKPOINT = "checkpoint"
    CODE = "code"
    CHANCE = "chance"


class Suspect(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One thing that a failure may follow; what does not name it is empty."""

    cause: Cause
    node: Annotated[str, Meta(max_length=128)] = ""
    device: Device = ""
    number: Total = 0
    """The rank, or the step of the checkpoint."""


class Change(enum.StrEnum):
    """The one thing that the next round changes."""

    DEVICES = "devices"
    """The workers of the suspect's node have other devices."""
    NODES = "nodes"
    """The suspect's node exchanges its ranks with another one."""
    CHECKPOINT = "checkpoint"
    """The workers begin from an earlier checkpoint."""


DeviceOrder = Annotated[tuple[Count, ...], Meta(max_length=MAX_WORKERS)]
"""Which of the devices of a node each local rank has, by their places in `CUDA_VISIBLE_DEVICES`; those after it are as
they were. Empty for no change."""


class FailedWorker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The first worker of a node that failed in the round `key`. `several` says whether others of the node failed in
    the same way, None before all of them have ended. The other fields are as in `Trial`."""

    key: RoundKey
    kind: Kind
    rank: Total
    local_rank: Count
    device: Device = ""
    several: bool | None = None
    depth: Total | None = None
    resumed: Total | None = None


class ExperimentsReport(msgspec.Struct, ReportPart, frozen=True, forbid_unknown_fields=True, tag="experiments"):
    """What a node reports: its last failure of a kind that is compared, and whether its workers can have each other's
    `devices` and another node's `ranks`: nothing that the user has fixed is changed."""

    failed: FailedWorker | None = None
    devices: bool = False
    ranks: bool = False


class NodeOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The devices of the workers of a node."""

    node: NodeId
    order: DeviceOrder


class Removed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node that failures follow, and that has to leave."""

    node_id: NodeId
    incarnation: NodeId
    why: BoundedReasons

    @property
    def key(self) -> NodeKey:
        return NodeKey(self.node_id, self.incarnation)


class ExperimentsState(msgspec.Struct, PlanPart, frozen=True, forbid_unknown_fields=True, tag="experiments"):
    """What is known of the failures of the job: the rounds that failed, the last one that was judged, the devices that
    workers have had since, and the nodes that have to leave. For the next round: the nodes that exchange their ranks,
    and the line about it. `last` says why no round follows."""

    trials: Annotated[tuple[Trial, ...], Meta(max_length=MAX_TRIALS)] = ()
    judged: RoundKey = RoundKey()
    orders: tuple[NodeOrder, ...] = ()
    removed: tuple[Removed, ...] = ()
    exchange: tuple[NodeKey, ...] = ()
    note: BoundedReasons = ()
    last: BoundedReasons = ()

    @property
    def exchanged(self) -> tuple[NodeKey, ...]:
        return self.exchange

    @property
    def round_note(self) -> Reasons:
        return self.note

    @property
    def ends_job(self) -> Reasons:
        return self.last

    def refuses(self, node: NodeKey) -> bool:
        return any(one.key == node for one in self.removed)


class ExperimentsAssignment(msgspec.Struct, AssignmentPart, frozen=True, forbid_unknown_fields=True, tag="experiments"):
    """The devices of the workers of a node, and why it has to leave, empty if it has not."""

    order: DeviceOrder = ()
    refused: BoundedReasons = ()

    @property
    def dismissal(self) -> Dismissal | None:
        if not self.refused:
            return None
        why = render(self.refused)
        return Dismissal(why, f"{why}. Put another machine in its place, or repair it.", ExitReason.FAULTY_NODE)
