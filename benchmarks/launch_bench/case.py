"""What a case is: who takes part, against whom the ratio is taken, the targets, and a function that runs one rival
once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from comparison.lost import Late
from comparison.report import Unit

from launch_bench.room import Report, Room

R = TypeVar("R")
"""Who takes part: for jobs of torch a `launch_bench.rivals.Rival`. It has a `name`, and says whether it is `absent`."""

NANOSECOND = 1e-9


@dataclass(frozen=True)
class Limits:
    """Seconds. `settle` is the same for every rival; it is when a template may learn what the workers import."""

    start: float = 120.0
    recovery: float = 120.0
    settle: float = 3.0


@dataclass(frozen=True)
class Measured:
    """The figures of one run, in seconds or bytes; the part "" is the rival itself. `unended` as in `Sample`."""

    values: Mapping[str, float]
    note: str = ""
    unended: frozenset[str] = frozenset()


def until_last(
    began_ns: int,
    limit: float,
    arrive: Callable[[float], Sequence[Report]],
    note: Callable[[Sequence[Report]], str] = lambda reports: "",
) -> Measured:
    """The time from `began_ns` to the last of the reports that `arrive` waits for, at most `limit` seconds.

    A run that is not there by then is measured too: it takes longer than that.
    """
    try:
        reports = arrive(limit)
    except Late:
        return Measured({"": limit}, f"did not end in {limit:g} s", frozenset({""}))
    return Measured({"": (max(report.at_ns for report in reports) - began_ns) * NANOSECOND}, note(reports))


@dataclass(frozen=True)
class Case(Generic[R]):
    """One comparison. `targets` say, for a rival and a part of it, how large the ratio to `baseline` may be."""

    name: str
    title: str
    unit: Unit
    rivals: tuple[R, ...]
    baseline: str
    measure: Callable[[R, Room, Limits], Measured]
    targets: Mapping[tuple[str, str], float] = field(default_factory=dict)
