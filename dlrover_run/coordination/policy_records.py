"""What policies add to the records of the core: a base class for each record that has a part of a policy.

A policy derives a struct from each class that it needs, with its own name as the tag. The core stores, compares and
sends these parts and uses only what is declared here; `features.registry.decode_part` decodes them.

A record has one field for them. It is None without a part, the part itself of one policy, and a combination of the
parts of several policies (`combined_records`), which is a part as well. So read a part with `find` or `get`, and write
it with `combined_records.with_part`, which leaves the parts of other policies as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Self

import msgspec

if TYPE_CHECKING:
    from dlrover_run.coordination.model import NodeReport, Plan
    from dlrover_run.coordination.size_choice import SizeChoice

PROGRAM = "dlrover-run"
"""The program that starts a job whose policy names no other."""


class PolicyRecord:
    """A part of a record that belongs to a policy."""

    __slots__ = ()

    has_rounds: ClassVar[bool] = True
    """Whether nodes of the job have ranks in rounds. Without, the policy alone decides what they run."""
    program: ClassVar[str] = PROGRAM
    """The program that starts jobs with this policy."""

    @property
    def policy_name(self) -> str:
        assert isinstance(self, msgspec.Struct), "each part is a struct"
        return str(self.__struct_config__.tag)

    def each(self) -> tuple[Self, ...]:
        """The part of each policy, where this is a combination; else this part."""
        return (self,)

    @classmethod
    def find(cls, part: PolicyRecord | None) -> Self | None:
        """The part of this class among those of a record, None without one."""
        if part is None or isinstance(part, cls):
            return part
        return next((one for one in part.each() if isinstance(one, cls)), None)

    @classmethod
    def get(cls, part: PolicyRecord | None) -> Self:
        """The part of this class among those of a record, an empty one without."""
        found = cls.find(part)
        return cls() if found is None else found


def has_part(part: PolicyRecord | None, policy_name: str) -> bool:
    """Whether a record has a part of that policy, which need not be imported to know."""
    return part is not None and any(one.policy_name == policy_name for one in part.each())


class PolicyRules(PolicyRecord):
    """The part of `JobRules`."""

    __slots__ = ()

    needs_rounds: ClassVar[bool] = False
    """Whether the policy acts on rounds only. A job without rounds does not have it, and the policy that decides alone
    there may follow its rules."""
    flags: ClassVar[Mapping[str, str]] = {}
    """The flag of each rule that has one."""
    per_node: ClassVar[frozenset[str]] = frozenset()
    """The rules that may differ between the nodes of a job, so that a difference is no mismatch."""
    value_names: ClassVar[Mapping[str, Mapping[int, str]]] = {}
    """What the user writes for a number, where that is a word."""

    @property
    def applies(self) -> bool:
        """Whether a job with these rules has the policy."""
        return True

    def problem(self) -> str | None:
        """A sentence when no job can have these rules, else None."""
        return None

    def job_size(self) -> str | None:
        """How large the job is, as text, where that is not a number of nodes."""
        return None


def applies(rules: PolicyRules | None, policy_name: str) -> bool:
    """Whether a job with these rules has that policy, which need not be imported to know."""
    return rules is not None and any(one.policy_name == policy_name and one.applies for one in rules.each())


class PolicyState(PolicyRecord):
    """The part of `Plan`."""

    __slots__ = ()

    @property
    def wanted_nodes(self) -> int:
        """How many nodes the policy wants a round to have, 0 for as many as the job may have."""
        return 0

    @property
    def size_choice(self) -> SizeChoice | None:
        """What the policy wants and why, if it chooses the number of nodes."""
        return None


class PolicyReport(PolicyRecord):
    """The part of `NodeReport`."""

    __slots__ = ()

    def problem(self, report: NodeReport, plan: Plan) -> str | None:
        """A sentence about what is wrong with this part of the report, else None."""
        return None

    def mismatch(self, program: str) -> str:
        """Why this node cannot take part in a job that was started with that program."""
        here = self.program
        return f"the job was started with {program} and this node with {here}: use one of them, or another --rdzv-id"


class PolicyRequest(PolicyRecord):
    """The part of `OperatorRequest`: another size of a job that is not a number of nodes."""

    __slots__ = ()

    @property
    def text(self) -> str:
        """What is requested, for people."""
        return ""


class PolicyAssignment(PolicyRecord):
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
    def dismisses(self) -> bool:
        """Whether the node is to leave the job."""
        return False

    @property
    def is_announced(self) -> bool:
        """Whether the node itself prints what came of it, so that only warnings of the coordinator are printed."""
        return False

    @property
    def is_checking(self) -> bool:
        """Whether the node has something to try before it may train."""
        return False

    @property
    def note(self) -> str:
        """What an operator should know of the node, a clause; empty where there is nothing to say."""
        return ""

    @property
    def stragglers(self) -> tuple[tuple[int, str], ...]:
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

    def after(self, before: PolicyAssignment | None) -> PolicyAssignment | None:
        """What is in force for the node after `before`."""
        return type(self).find(before) if self.keep else self

    def split(self) -> tuple[PolicyAssignment | None, PolicyAssignment]:
        """What all nodes receive alike, and this node's own part."""
        return None, self

    def join(self, common: PolicyAssignment) -> PolicyAssignment:
        """The whole whose two parts are these."""
        return self

    def remember(self, memory: PolicyMemory | None) -> PolicyMemory | None:
        """What a node remembers after this part, to repeat it to a coordinator that has lost its records."""
        return None


class PolicyMemory:
    """What a node remembers of the parts that it was assigned."""

    def forget(self) -> PolicyMemory:
        """The memory after an assignment without a part."""
        return self

    def add_to(self, part: PolicyReport) -> PolicyReport:
        """The part of a report, with what is to be repeated."""
        return part


class PolicyProgress(PolicyRecord):
    """The part of `Waiting`."""

    __slots__ = ()
