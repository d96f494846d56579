"""The records of the node check: what a node is to try, the results, and what follows from them.

A node *computes* (each of its devices for itself) and *links* (all local ranks of two nodes gather each other's data).
The two are timed apart, because the time of a link depends on the other end as much. Speeds are in standard
units: TFLOP/s (1e12 operations) and GB/s (1e9 bytes).
"""

from __future__ import annotations

import enum
from collections.abc import Container
from typing import Annotated

import msgspec
from msgspec import Meta

from dlrover_run.coordination.records.assignment import AssignmentPart, Dismissal, WaitingPart
from dlrover_run.coordination.records.bounds import (
    Count,
    Name,
    NodeId,
    Port,
    Total,
)
from dlrover_run.coordination.records.plan import Plan, PlanPart
from dlrover_run.coordination.records.report import NodeReport, ReportPart
from dlrover_run.coordination.records.round import Member, NodeKey
from dlrover_run.coordination.records.validation import MAX_ROUND, UNKNOWN_EPOCH, is_known_epoch
from dlrover_run.exit_reasons import ExitReason
from dlrover_run.words.reasons import BoundedReasons

MAX_PROBLEM = 500
"""Characters of the sentence about what a node check found."""

Problem = Annotated[str, Meta(max_length=MAX_PROBLEM)]
# JSON has no infinity, and no device is that fast.
Rate = Annotated[float, Meta(ge=0, le=1e12)]

MAX_DEVICES = 64
"""Devices of a node whose speed travels: of more than that the slowest."""

MAX_LINKS = 4
"""Links that a node tries in one round: a triple has two for each."""

MAX_ROWS = 64
"""Nodes of a check of which a user is shown a line each: of more than that the most urgent ones."""

MAX_LINK_ROWS = 120
"""Links of which a user is shown a line each, every pair of 16 nodes: of more than that the slowest."""

MAX_LINK_PROBLEM = 120
"""Characters of the text on one link that failed: with all the rows there are, they fit into one message."""


CPU = "cpu"
"""The name of the device of a local rank that computes without an accelerator."""


class HealthStatus(enum.StrEnum):
    """The result of a check for one node. PENDING: it goes on. UNCHECKED: it takes no part in any."""

    PENDING = "pending"
    UNCHECKED = "unchecked"
    PASSED = "passed"
    STRAGGLER = "straggler"
    FAULT = "fault"


class CheckKey(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """Which task: the coordinator that gave it, its check's number from 1, and the round of that check from 0.

    All zero is what a node tries by itself before it is assigned a task.
    """

    epoch: int = 0
    number: Total = 0
    round: Count = 0


class DeviceSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast the device of one local rank multiplied matrices."""

    local_rank: Count
    name: Name
    tflops: Rate


class ComputeResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of computing. `problem` is a clause about the first local rank that failed, empty when none did;
    `wrong` is true if a result was wrong, which no second try makes right."""

    key: CheckKey = CheckKey()
    devices: Annotated[tuple[DeviceSpeed, ...], Meta(max_length=MAX_DEVICES)] = ()
    problem: Problem = ""
    wrong: bool = False

    @property
    def tflops(self) -> float:
        """The speed of the slowest device, for which all others wait; 0 when there is none."""
        return min((device.tflops for device in self.devices), default=0.0)

    @property
    def device(self) -> str:
        """The name of the slowest device; `CPU` as soon as one of the local ranks has nothing better."""
        names = [device.name for device in self.devices]
        return CPU if CPU in names else (names or [""])[0]


class LinkResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of one link. `other` is the place of the other end in the check, this node's own for a link within it;
    `gigabytes` per second is 0 and `problem` the cause when it failed."""

    other: Count
    gigabytes: Rate = 0.0
    problem: Problem = ""


class LinkResults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The results of the links of one task; one that is not among `results` was not tried, and nothing is known of it.
    `problem` is set if this node's own check process ended, or hung where no other node was concerned; empty when it
    did not."""

    key: CheckKey
    results: Annotated[tuple[LinkResult, ...], Meta(max_length=MAX_LINKS)] = ()
    problem: Problem = ""


class LinkEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One end of a link: its place in the check, and its address; `port` is held there for the store of links."""

    node: Count
    address: Name
    port: Port
    workers: Count


class CheckTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a node shall try now: compute if asked to, then its links one after the other, in that order.

    Each link is named by its ends; the first of them hosts the store. A link of one end is within the node. `node` is
    this node's place in the check; `timeout` is how many seconds the whole may take, and a link a quarter of that.
    """

    key: CheckKey
    node: Count
    compute: bool
    links: Annotated[tuple[tuple[LinkEnd, ...], ...], Meta(max_length=MAX_LINKS)]
    timeout: float


class NodeHealth(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of one node's health. `gigabytes` is the best of its links, 0 where there was none. `reason` is a
    clause, or empty. `dismissed` is true if the node has to leave."""

    node_id: NodeId
    incarnation: NodeId
    host: Name
    status: HealthStatus
    tflops: Rate = 0.0
    gigabytes: Rate = 0.0
    reason: Problem = ""
    dismissed: bool = False

    @property
    def is_straggler(self) -> bool:
        return self.status is HealthStatus.STRAGGLER


class LinkRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One link as it is shown to a user. `one` < `other` are places in the list of nodes that is sent with it, or equal
    for a link within a node; places, because several nodes may have one name. `gigabytes` per second is the best of its
    tries, 0 when all failed, and `problem` is then a clause with the cause."""

    one: Count
    other: Count
    gigabytes: Rate = 0.0
    problem: Annotated[str, Meta(max_length=MAX_LINK_PROBLEM)] = ""


class CheckedNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a running check. `already_passed` means that it has passed an earlier one and is here as a
    partner, or only to be compared with; `is_here` that it was still here when the last round of the check ended."""

    node_id: str
    incarnation: str
    host: str
    address: str
    port: int
    workers: int
    already_passed: bool = False
    is_here: bool = True


class ComputeFact(msgspec.Struct, frozen=True):
    """One try at computing: of which node, with which speed, on which device (empty where it is not known);
    `problem` when it failed. A check process that ended in a link (`linking`) counts as one too."""

    node: int
    tflops: float = 0.0
    problem: str = ""
    wrong: bool = False
    device: str = ""
    linking: bool = False


class LinkFact(msgspec.Struct, frozen=True):
    """One try at a link between two nodes, `one` < `other`; or within one, when they are the same."""

    one: int
    other: int
    gigabytes: float = 0.0
    problem: str = ""

    @property
    def ends(self) -> tuple[int, int]:
        return self.one, self.other


class FlaggedNode(msgspec.Struct, frozen=True):
    """A node that the check has flagged as faulty or slow before its end, and why."""

    node: int
    status: HealthStatus
    reason: str


class NodeCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A check that goes on: a part of the plan. Nodes are named by their place in `nodes`.

    In the round `key`, since job time `since`, those in `compute` compute and those of each of `groups` try the links
    between them. `compute_facts` and `link_facts` are the results of earlier rounds, and `flagged` are the nodes for
    which these are enough. With `during_training` others train meanwhile, so no node links. `plan_reasons` are those of
    the plan before the check.
    """

    key: CheckKey
    since: float
    nodes: tuple[CheckedNode, ...]
    compute: tuple[int, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    compute_facts: tuple[ComputeFact, ...] = ()
    link_facts: tuple[LinkFact, ...] = ()
    flagged: tuple[FlaggedNode, ...] = ()
    during_training: bool = False
    plan_reasons: BoundedReasons = ()


class NodeCheckState(msgspec.Struct, PlanPart, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="node_check"):
    """The state of the node check; a part of the plan. `check` is the check that runs, `check_count` the number of
    the last one, `health` what is known of each node, and `links` what is known of links between them, whose ends are
    places in `health`."""

    check: NodeCheck | None = None
    check_count: int = 0
    health: tuple[NodeHealth, ...] = ()
    links: tuple[LinkRow, ...] = ()

    @property
    def has_held(self) -> bool:
        return self.check_count > 0

    def expected(self) -> list[Member]:
        """The nodes of a check that runs, and those that have passed one. Dismissed nodes are not waited for."""
        checked = self.check.nodes if self.check is not None else ()
        nodes = [Member(node.node_id, node.incarnation, node.host, node.workers) for node in checked]
        passed = (one for one in self.health if not one.dismissed)
        return [*nodes, *(Member(one.node_id, one.incarnation, one.host, 0) for one in passed)]

    def has_removed(self, nodes: Container[NodeKey]) -> bool:
        return any(one.dismissed and NodeKey(one.node_id, one.incarnation) in nodes for one in self.health)

    def at_end(self) -> NodeCheckState:
        return self if self.check is None else msgspec.structs.replace(self, check=None)


class NodeCheckReport(
    msgspec.Struct,
    ReportPart,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag="node_check",
):
    """What a node reports of its part in a node check: its latest results, and the port that it holds for the store
    of links, 0 without a check."""

    check_port: Port = 0
    compute_result: ComputeResult | None = None
    link_result: LinkResults | None = None

    def problem(self, report: NodeReport, plan: Plan) -> str | None:
        keys = [result.key for result in (self.compute_result, self.link_result) if result is not None]
        if not all(is_known_epoch(key.epoch, plan) for key in keys):
            return UNKNOWN_EPOCH
        if any(key.number > max(MAX_ROUND, NodeCheckState.get(plan.parts).check_count) for key in keys):
            return "a report names a node check that no job has"
        return None


class NodeCheckAssignment(
    msgspec.Struct,
    AssignmentPart,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag="node_check",
):
    """What a node is to try for a node check, and what is known of its health. The node with rank 0 also receives the
    results of other nodes, and of the links between them, to print them."""

    check_task: CheckTask | None = None
    health: NodeHealth | None = None
    health_table: Annotated[tuple[NodeHealth, ...], Meta(max_length=MAX_ROWS)] = ()
    link_table: Annotated[tuple[LinkRow, ...], Meta(max_length=MAX_LINK_ROWS)] = ()

    @property
    def dismissal(self) -> Dismissal | None:
        return None if self.health is None or not self.health.dismissed else explain_dismissal(self.health)

    @property
    def needs_idle_node(self) -> bool:
        return self.check_task is not None

    @property
    def note(self) -> str:
        return "" if self.health is None or not self.health.reason else f"node check: {self.health.reason}"

    @property
    def is_announced(self) -> bool:
        """A node that passes prints one line of its own. The coordinator's lines are for users that compare nodes."""
        return self.health is not None and self.health.status is HealthStatus.PASSED


def explain_dismissal(node_health: NodeHealth) -> Dismissal:
    """Why the node has to leave: the line that DLRover prints, which users search for, and below it the reason and what
    to do."""
    reason = f"the node check dismissed this node: {node_health.reason}"
    found = node_health.reason or "no reason was given"
    if node_health.is_straggler:
        error = (
            "RuntimeError: The node is a straggler and exits.\n"
            f"  The node check found it too slow: {found}; "
            "put another machine in its place, or leave --exclude-straggler out to train at its pace."
        )
        return Dismissal(reason, error, ExitReason.STRAGGLER)
    error = (
        "RuntimeError: The node network is breakdown.\n"
        f"  The node check found it broken: {found}; repair it or put another machine in its place."
    )
    return Dismissal(reason, error, ExitReason.FAULTY_NODE)


class NodeCheckProgress(msgspec.Struct, WaitingPart, frozen=True, forbid_unknown_fields=True, tag="node_check"):
    rows: Annotated[tuple[NodeHealth, ...], Meta(max_length=MAX_ROWS)] = ()
