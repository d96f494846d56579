"""The runs of the benchmark, in the order in which they are done, and what is kept of each. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from core.series import Kept

KILLS, HANGS, PAUSES, MEMORY, INNOCENTS = PARTS = ("kills", "hangs", "pauses", "memory", "innocents")
"""In the order of the tables."""

NO_TIME = "did not fit into the limit"


class Key(NamedTuple):
    """A run: its part, its case, its number."""

    part: str
    case: str
    turn: int


@dataclass(frozen=True)
class Record:
    """What came of a run. `figures` are seconds, but for those whose names say otherwise; None was not reached.

    `left_out` says why it was not begun, `lost` what happened in place of what was to be measured. `device` is the GPU
    with its driver and libraries, or that there was none.
    """

    key: Key
    device: str
    figures: Mapping[str, float | None] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    left_out: str = ""
    lost: str = ""

    @property
    def why_empty(self) -> str:
        """Why there is no result; empty if there is one."""
        return f"not run: {self.left_out}" if self.left_out else self.lost


@dataclass(frozen=True)
class Planned:
    """A run with the seconds that it may take. It is not begun with less than `least` left. Those of one `step` do not
    disturb each other, and run side by side on a machine with enough processors."""

    key: Key
    limit: float
    least: float
    step: int


Times = tuple[float, float]
"""The limit of a run and the seconds with which it is begun at the least."""


def steps_of(plan: Sequence[Planned]) -> Iterator[list[Planned]]:
    """The runs that may be done at the same time, step by step."""
    for _, group in groupby(plan, key=lambda one: one.step):
        yield list(group)


Steps = Sequence[Sequence[tuple[str, str]]]
"""The part and the case of each run, those together that may be done at the same time."""


def plan_of(steps: Steps, times: Mapping[str, Times], only: Sequence[str] = (), repetitions: int = 1) -> list[Planned]:
    """The runs of the parts and cases that are wanted. `only` names parts or cases, as `hangs` or `hangs/sleep`, empty
    for all; `times` are by part, or by part and case in the same way. Raises ValueError for an unknown name."""
    known = {name for step in steps for part, case in step for name in (part, f"{part}/{case}")}
    if unknown := [name for name in only if name not in known]:
        raise ValueError(f"no part or case is named {unknown[0]}")
    return [
        Planned(Key(part, case, turn), *times.get(f"{part}/{case}", times[part]), turn * len(steps) + number)
        for turn in range(1, repetitions + 1)
        for number, step in enumerate(steps)
        for part, case in step
        if not only or part in only or f"{part}/{case}" in only
    ]


def newest(kept: Sequence[Kept[Record]], plan: Sequence[Planned]) -> list[Record]:
    """The records of the tables: those that are kept, and for each planned run without one that it did not fit."""
    found = {one.run.key: one.run for one in kept}
    device = kept[-1].run.device if kept else ""
    missing = {one.key: Record(one.key, device, left_out=NO_TIME) for one in plan if one.key not in found}
    order = {part: number for number, part in enumerate(PARTS)}
    every = {**missing, **found}
    place = {key: at for at, key in enumerate(dict.fromkeys([*(one.key for one in plan), *every]))}
    return sorted(every.values(), key=lambda one: (order[one.key.part], place[one.key]))
