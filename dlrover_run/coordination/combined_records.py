"""The parts of several policies in one field of a record. A record of a job with one policy holds that policy's part
itself, so it is as small as if there were no other policies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Meta

from dlrover_run.coordination.policy_records import (
    PROGRAM,
    PolicyAssignment,
    PolicyMemory,
    PolicyProgress,
    PolicyRecord,
    PolicyReport,
    PolicyRules,
    PolicyState,
)

if TYPE_CHECKING:
    from dlrover_run.coordination.size_choice import SizeChoice

MAX_POLICIES = 8
"""More policies than any job has."""

TAG = "combined"
"""The tag of these records; no policy has this name."""

Part = TypeVar("Part", bound=PolicyRecord)


class _Combined(msgspec.Struct, PolicyRecord, frozen=True, forbid_unknown_fields=True, tag=TAG):
    """Parts of one kind, at least two, at most one of each policy, in the order of the policies' names: equal sets of
    parts are equal records."""

    parts: Any

    def __post_init__(self) -> None:
        names = [part.policy_name for part in self.parts]
        if len(names) < 2 or TAG in names or names != sorted(set(names)):
            raise ValueError("combined parts are those of two or more policies, by name")

    def each(self) -> tuple[Any, ...]:
        found: tuple[Any, ...] = self.parts
        return found

    @property
    def has_rounds(self) -> bool:  # type: ignore[override]
        return all(part.has_rounds for part in self.parts)

    @property
    def program(self) -> str:  # type: ignore[override]
        return next((part.program for part in self.parts if part.program != PROGRAM), PROGRAM)


class CombinedRules(_Combined, PolicyRules, frozen=True, tag=TAG):
    parts: Annotated[tuple[PolicyRules, ...], Meta(max_length=MAX_POLICIES)]

    @property
    def applies(self) -> bool:
        return any(part.applies for part in self.parts)

    def problem(self) -> str | None:
        if sum(not part.has_rounds for part in self.parts) > 1:
            return "two policies of one job each decide alone what its nodes run"
        return next((problem for part in self.parts if (problem := part.problem()) is not None), None)

    def job_size(self) -> str | None:
        return next((size for part in self.parts if (size := part.job_size()) is not None), None)


class CombinedState(_Combined, PolicyState, frozen=True, tag=TAG):
    parts: Annotated[tuple[PolicyState, ...], Meta(max_length=MAX_POLICIES)]

    @property
    def wanted_nodes(self) -> int:
        """The fewest that any policy wants."""
        return min((part.wanted_nodes for part in self.parts if part.wanted_nodes), default=0)

    @property
    def size_choice(self) -> SizeChoice | None:
        return next((choice for part in self.parts if (choice := part.size_choice) is not None), None)


class CombinedReport(_Combined, PolicyReport, frozen=True, tag=TAG):
    parts: Annotated[tuple[PolicyReport, ...], Meta(max_length=MAX_POLICIES)]

    def problem(self, report: Any, plan: Any) -> str | None:
        return next((found for part in self.parts if (found := part.problem(report, plan)) is not None), None)

    def mismatch(self, program: str) -> str:
        return next(part for part in self.parts if part.program == self.program).mismatch(program)


class CombinedAssignment(_Combined, PolicyAssignment, frozen=True, tag=TAG):
    parts: Annotated[tuple[PolicyAssignment, ...], Meta(max_length=MAX_POLICIES)]

    @property
    def has_tasks(self) -> bool:
        return any(part.has_tasks for part in self.parts)

    @property
    def dismisses(self) -> bool:
        return any(part.dismisses for part in self.parts)

    @property
    def is_announced(self) -> bool:
        """Whether the node prints all of it itself. A line that is printed twice is better than one that is lost."""
        return all(part.is_announced for part in self.parts)

    @property
    def is_checking(self) -> bool:
        return any(part.is_checking for part in self.parts)

    @property
    def note(self) -> str:
        return "; ".join(part.note for part in self.parts if part.note)

    @property
    def stragglers(self) -> tuple[tuple[int, str], ...]:
        return tuple(found for part in self.parts for found in part.stragglers)

    @property
    def task_names(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.task_names)

    @property
    def job_processes(self) -> int:
        return max(part.job_processes for part in self.parts)

    def after(self, before: PolicyAssignment | None) -> PolicyAssignment | None:
        return combine(part.after(before) for part in self.parts)

    def split(self) -> tuple[PolicyAssignment | None, PolicyAssignment]:
        common, own = zip(*(part.split() for part in self.parts), strict=True)
        return combine(common), combine(own) or self

    def join(self, common: PolicyAssignment) -> PolicyAssignment:
        return combine(part.join(common) for part in self.parts) or self


class CombinedProgress(_Combined, PolicyProgress, frozen=True, tag=TAG):
    parts: Annotated[tuple[PolicyProgress, ...], Meta(max_length=MAX_POLICIES)]


class Memories(msgspec.Struct, frozen=True):
    """What a node remembers of the parts that it was assigned, by the name of the policy."""

    by_policy: Mapping[str, PolicyMemory] = msgspec.field(default_factory=dict)

    def follow(self, part: PolicyAssignment | None) -> Memories:
        """The memory after an assignment with that part, or those parts."""
        given = {one.policy_name: one for one in part.each()} if part is not None else {}
        found = {name: one.remember(self.by_policy.get(name)) for name, one in given.items()}
        found |= {name: one.forget() for name, one in self.by_policy.items() if name not in given}
        return Memories({name: one for name, one in found.items() if one is not None})

    def add_to(self, part: PolicyReport) -> PolicyReport:
        for one in part.each():
            if (memory := self.by_policy.get(one.policy_name)) is not None:
                part = with_part(part, memory.add_to(one))
        return part


_KINDS: Mapping[type[PolicyRecord], type[_Combined]] = {
    PolicyRules: CombinedRules,
    PolicyState: CombinedState,
    PolicyReport: CombinedReport,
    PolicyAssignment: CombinedAssignment,
    PolicyProgress: CombinedProgress,
}

RECORDS = tuple(_KINDS.values())


def combine(parts: Iterable[Part | None]) -> Part | None:
    """The value of a record's field that has these parts: None, the only part, or a combination. Of two parts of one
    policy the later one counts."""
    found = {one.policy_name: one for part in parts if part is not None for one in part.each()}
    if len(found) < 2:
        return next(iter(found.values()), None)
    ordered = tuple(found[name] for name in sorted(found))
    combined: Any = next(kind for base, kind in _KINDS.items() if isinstance(ordered[0], base))
    return cast(Part, combined(ordered))


def with_part(before: Part | None, part: Part) -> Part:
    """The value of a record's field after `before`, in which the part is the one of its policy."""
    found = combine((before, part))
    assert found is not None, "there is at least that part"
    return found
