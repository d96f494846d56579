"""What features add to the records of the core: a base class for each record that has parts of features.

A feature derives a struct from each class that it needs, with its own name as the tag. The core stores, compares and
sends these parts and uses only what is declared here; `features.registry.decode_part` decodes them.

The field `parts` of a record is a tuple with at most one part of each feature, in the order of their names, so records
with equal parts are equal. Read a part with `find` or `get`, write it with `with_part`, which leaves those of other
features as they are.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Self, TypeVar

import msgspec

if TYPE_CHECKING:
    from dlrover_run.coordination.model import Member, NodeKey, NodeReport, Plan
    from dlrover_run.coordination.size_choice import SizeChoice
    from dlrover_run.exit_reasons import ExitReason

Kind = Literal["observer", "gate", "engine"]

MAX_PARTS = 8
"""More features than any job has."""

PROGRAM = "dlrover-run"
"""The program that starts a job whose features name no other."""


class Part:
    """A part of a record that belongs to a feature."""

    __slots__ = ()

    program: ClassVar[str] = PROGRAM
    """The program that starts jobs with this feature."""

    @property
    def feature(self) -> str:
        """The name of the feature that has this part."""
        assert isinstance(self, msgspec.Struct), "each part is a struct"
        return str(self.__struct_config__.tag)

    @classmethod
    def find(cls, parts: Iterable[Part]) -> Self | None:
        """The part of this class among those of a record, None without one."""
        return next((part for part in parts if isinstance(part, cls)), None)

    @classmethod
    def get(cls, parts: Iterable[Part]) -> Self:
        """The part of this class among those of a record, an empty one without."""
        found = cls.find(parts)
        return cls() if found is None else found


P = TypeVar("P", bound=Part)


def has_part(parts: Iterable[Part], feature: str) -> bool:
    """Whether a record has a part of that feature, which need not be imported to know."""
    return any(part.feature == feature for part in parts)


def with_part(parts: Iterable[P], part: P) -> tuple[P, ...]:
    """The parts of a record in which this one takes the place of the one of its feature."""
    return combine(parts, (part,))


def combine(*several: Iterable[P]) -> tuple[P, ...]:
    """The parts of a record that has all of these. Of two parts of one feature the later one counts."""
    found = {part.feature: part for parts in several for part in parts}
    return tuple(found[name] for name in sorted(found))


def check_parts(parts: tuple[Part, ...]) -> None:
    """Raise ValueError if these are not the parts of a record. Called where a record is made or decoded."""
    if len(parts) > 1:
        names = [part.feature for part in parts]
        if len(names) > MAX_PARTS or names != sorted(set(names)):
            raise ValueError("parts of a record are those of different features, in the order of their names")


class RulesPart(Part):
    """The part of `JobRules`."""

    __slots__ = ()

    kind: ClassVar[Kind] = "observer"
    """What the feature is in a decision, of which a job has one gate and one engine at most."""
    needs_rounds: ClassVar[bool] = False
    """Whether the feature acts on rounds of workers only. A job with another engine does not have it, and the engine
    may follow its rules."""
    chooses_size: ClassVar[bool] = False
    """Whether the feature may want fewer nodes than are here (`PlanPart.wanted_nodes`)."""
    flags: ClassVar[Mapping[str, str]] = {}
    """The flag of each rule that has one."""
    per_node: ClassVar[frozenset[str]] = frozenset()
    """The rules that may differ between the nodes of a job, so that a difference is no mismatch."""
    value_names: ClassVar[Mapping[str, Mapping[int, str]]] = {}
    """What the user writes for a number, where that is a word."""

    @property
    def applies(self) -> bool:
        """Whether a job with these rules has the feature."""
        return True

    def problem(self) -> str | None:
        """A sentence when no job can have these rules, else None."""
        return None

    def job_size(self) -> str | None:
        """How large the job is, as text, where that is not a number of nodes."""
        return None


def applies(rules: Iterable[RulesPart], feature: str) -> bool:
    """Whether a job with these rules has that feature, which need not be imported to know."""
    return any(part.feature == feature and part.applies for part in rules)


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

    def at_end(self) -> PlanPart:
        """The part in the plan of a job that is over."""
        return self

    def excuses_failure(self, plan: Plan) -> bool:
        """Whether a failure of a worker ends the round of this plan without a charge, because the feature has caused
        it. The feature must limit how often. Called once for each failure that ends a round."""
        return False


class ReportPart(Part):
    """The part of `NodeReport`."""

    __slots__ = ()

    def problem(self, report: NodeReport, plan: Plan) -> str | None:
        """A sentence about what is wrong with this part of the report, else None."""
        return None

    def mismatch(self, program: str) -> str:
        """Why this node cannot take part in a job that was started with that program."""
        here = self.program
        return f"the job was started with {program} and this node with {here}: use one of them, or another --rdzv-id"


class RequestPart(Part):
    """The part of `OperatorRequest`: another size of a job that is not a number of nodes."""

    __slots__ = ()

    @property
    def text(self) -> str:
        """What is requested, for people."""
        return ""


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
