"""What features add to the records of the core: a base class for each record that has parts of features.

A feature derives a struct from each class that it needs, with its own name as the tag. The core stores, compares and
sends these parts and uses only what is declared here; `features.registry.decode_part` decodes them.

The field `parts` of a record is a tuple with at most one part of each feature, in the order of their names, so records
with equal parts are equal. Read a part with `find` or `get`, write it with `with_part`, which leaves those of other
features as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Self, TypeVar

import msgspec

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
