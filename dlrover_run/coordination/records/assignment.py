"""An assignment: what one node is to do, and what it waits for. Only the coordinator writes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
from msgspec import Meta

from dlrover_run.coordination.records.bounds import Count, Name, Port
from dlrover_run.coordination.records.parts import Part, check_parts
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.report import ReportPart
from dlrover_run.coordination.records.round import (
    Failure,
    PlannedChange,
    RankAssignment,
    RoundKey,
)
from dlrover_run.words.reasons import BoundedReasons, render

if TYPE_CHECKING:
    from dlrover_run.exit_reasons import ExitReason


class Dismissal(NamedTuple):
    """Why a node has to leave its job: a sentence without its end for a log, one with what to do for the user, and what
    its launcher ends with."""

    reason: str
    error: str
    exit_reason: ExitReason


class AssignmentPart(Part):
    """The part of `Assignment` and of `NodeView`."""

    __slots__ = ()

    @property
    def has_tasks(self) -> bool:
        """Whether the node has something to run though it has no rank."""
        return False

    @property
    def keep(self) -> bool:
        """Whether the node continues with the part before this one, which a new coordinator does not know yet."""
        return False

    @property
    def dismissal(self) -> Dismissal | None:
        """Why the node is to leave the job; None if it is not."""
        return None

    @property
    def is_announced(self) -> bool:
        """Whether the node itself prints what came of it, so that only warnings of the coordinator are printed."""
        return False

    @property
    def needs_idle_node(self) -> bool:
        """Whether the node has something to try before it may train, for which its devices have to be free."""
        return False

    @property
    def note(self) -> str:
        """What an operator should know of the node, a clause; empty where there is nothing to say."""
        return ""

    @property
    def slow_ranks(self) -> tuple[tuple[int, str], ...]:
        """The ranks of the node for which the others wait, each with a word for the cause."""
        return ()

    @property
    def task_names(self) -> tuple[str, ...]:
        """The names of the tasks of the node, where it has no ranks."""
        return ()

    @property
    def job_processes(self) -> int:
        """How many processes the job has, as far as the part has that."""
        return 0

    def split(self) -> tuple[AssignmentPart | None, AssignmentPart]:
        """What all nodes receive alike, and this node's own part."""
        return None, self

    def join(self, common: AssignmentPart) -> AssignmentPart:
        """The whole whose two parts are these."""
        return self

    def remember(self, memory: PartMemory | None) -> PartMemory | None:
        """What a node remembers after this part, to repeat it to a coordinator that has lost its records."""
        return None


def in_force(parts: Iterable[AssignmentPart], before: Iterable[AssignmentPart]) -> tuple[AssignmentPart, ...]:
    """The parts that hold for a node after `before`: those that it received, or the ones that it is to keep."""
    kept = ((part, type(part).find(before) if part.keep else part) for part in parts)
    return tuple(part for _, part in kept if part is not None)


def split(parts: Iterable[AssignmentPart]) -> tuple[tuple[AssignmentPart, ...], tuple[AssignmentPart, ...]]:
    """What all nodes receive alike, and what is a node's own."""
    pairs = [part.split() for part in parts]
    return tuple(common for common, _ in pairs if common is not None), tuple(own for _, own in pairs)


def join(own: Iterable[AssignmentPart], common: Iterable[AssignmentPart]) -> tuple[AssignmentPart, ...]:
    """The parts of a node's assignment, from both."""
    shared = {part.feature: part for part in common}
    return tuple(part.join(shared[part.feature]) if part.feature in shared else part for part in own)


class PartMemory:
    """What a node remembers of the parts that it was assigned."""

    def forget(self) -> PartMemory:
        """The memory after an assignment without a part."""
        return self

    def add_to(self, part: ReportPart) -> ReportPart:
        """The part of a report, with what is to be repeated."""
        return part


class Memories(msgspec.Struct, frozen=True):
    """What a node remembers of the parts that it was assigned, by the name of the feature."""

    by_feature: Mapping[str, PartMemory] = msgspec.field(default_factory=dict)

    def follow(self, parts: Iterable[AssignmentPart]) -> Memories:
        """The memory after an assignment with those parts."""
        given = {part.feature: part for part in parts}
        found = {name: part.remember(self.by_feature.get(name)) for name, part in given.items()}
        found |= {name: memory.forget() for name, memory in self.by_feature.items() if name not in given}
        return Memories({name: memory for name, memory in found.items() if memory is not None})

    def add_to(self, parts: Iterable[ReportPart]) -> tuple[ReportPart, ...]:
        """The parts of a report, with what is to be repeated."""
        pairs = ((part, self.by_feature.get(part.feature)) for part in parts)
        return tuple(part if memory is None else memory.add_to(part) for part, memory in pairs)


class WaitingPart(Part):
    """The part of `Waiting`."""

    __slots__ = ()


class Waiting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a node without ranks waits for, and how many seconds at most from now, None for no limit. `parts` are what
    the features of the job show meanwhile."""

    reasons: BoundedReasons
    seconds: float | None = None
    parts: tuple[WaitingPart, ...] = ()

    def __post_init__(self) -> None:
        check_parts(self.parts)

    @property
    def text(self) -> str:
        return render(self.reasons)


MAX_PEERS = 3
"""Other nodes whose addresses a node receives, by which it finds out whether it is cut off."""


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Where another node of the job answers. Nothing need listen there."""

    address: Name
    port: Port


Peers = Annotated[tuple[Peer, ...], Meta(max_length=MAX_PEERS)]


MAX_SUCCESSORS = 8
"""Nodes that may start the next master; each node receives their addresses. All of them are hardly lost at once."""


Successors = Annotated[tuple[Name, ...], Meta(max_length=MAX_SUCCESSORS)]


class NodeView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One node's own part of its assignment, which no other node receives. `ranks` is None for a node without ranks in
    the round. `parts` are what the features of the job assign to the node. `peers` are some nodes on other machines,
    `successors` the addresses of the nodes that may start the next master, in the order of their ranks. `drains` asks
    the node to leave."""

    ranks: RankAssignment | None = None
    parts: tuple[AssignmentPart, ...] = ()
    peers: Peers = ()
    successors: Successors = ()
    drains: bool = False

    def __post_init__(self) -> None:
        check_parts(self.parts)

    @property
    def waits(self) -> bool:
        """Whether the node has nothing to run in the job, and waits until it has."""
        return self.ranks is None and not any(part.has_tasks for part in self.parts)

    @property
    def dismissal(self) -> Dismissal | None:
        """Why the node is to leave the job; None if it is not."""
        return next((part.dismissal for part in self.parts if part.dismissal is not None), None)

    @property
    def is_announced(self) -> bool:
        """Whether the node prints all of what came of its parts itself, so that only warnings of the coordinator are
        printed. A line that is printed twice is better than one that is lost."""
        return bool(self.parts) and all(part.is_announced for part in self.parts)

    @property
    def needs_idle_node(self) -> bool:
        """Whether the node has something to try before it may train, for which its devices have to be free."""
        return any(part.needs_idle_node for part in self.parts)


class Assignment(NodeView, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The part of the plan that one node needs. `change` is the planned change for which it reports the next
    checkpoint. `waiting` is what it waits for, if it waits."""

    epoch: int = 0
    phase: PlanPhase = PlanPhase.GATHERING
    key: RoundKey = RoundKey()
    restart_count: Count = 0
    reasons: BoundedReasons = ()
    failure: Failure | None = None
    change: PlannedChange | None = None
    waiting: Waiting | None = None

    @property
    def reason(self) -> str:
        return render(self.reasons)
