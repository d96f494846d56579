"""The arithmetic of a benchmark: medians, ratios pair by pair, and whether a target was reached. Pure."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Lost(Exception):
    """The run did not do what the case requires; the message says what happened instead."""


class Late(Lost):
    """The job is still running, but its time is up."""


@dataclass(frozen=True)
class Measured:
    """The figures of one run, by part; the part "" is the run itself. None: the run was lost.

    The parts in `unended` had not ended when the benchmark stopped waiting. Their figure is the time waited, so the
    true one is greater.
    """

    values: Mapping[str, float] | None
    note: str = ""
    unended: frozenset[str] = frozenset()


class Sample(NamedTuple):
    """One run of one rival."""

    rival: str
    turn: int
    measured: Measured


class Reading(NamedTuple):
    """The figure of one part of one run: None if the run was lost, a lower bound if the part has not `ended`."""

    value: float | None
    ended: bool = True


Ratio = float | Literal["lost"]
"""JSON has no infinity, so the ratio of a lost run is "lost"."""


@dataclass(frozen=True)
class Row:
    """One row of a table. `samples` are in the order of the turns, None where the run was lost.

    `limit` is the shortest time after which the benchmark stopped waiting, None if all runs ended. `ratio` is the
    median of the ratios to the baseline, turn by turn, and `spread` the smallest and the greatest of them; None if
    there is no pair. It is an upper `bound` if a run of the baseline did not end. `reached` is None if there is no
    target or nothing to compare.
    """

    title: str
    samples: tuple[float | None, ...]
    lost: int
    median: float | None
    low: float | None
    high: float | None
    limit: float | None
    ratio: Ratio | None
    spread: tuple[Ratio, Ratio] | None
    bound: bool
    target: float | None
    reached: bool | None
    notes: str

    @property
    def ended(self) -> tuple[float, ...]:
        """The figures of the runs that ended."""
        return tuple(value for value in self.samples if value is not None and (not self.limit or value < self.limit))


def pair_ratios(ours: Mapping[int, Reading], theirs: Mapping[int, Reading]) -> list[float]:
    """The ratio of each turn, so that changing load affects both sides of a pair alike.

    A turn whose baseline was lost is left out. A run that was lost or did not end counts as infinite against a baseline
    that ended; if neither ended, there is nothing to compare.
    """
    ratios = []
    for turn, own in ours.items():
        base = theirs.get(turn)
        if base is None or base.value is None or base.value <= 0:
            continue
        if own.value is not None and own.ended:
            ratios.append(own.value / base.value)
        elif base.ended:
            ratios.append(math.inf)
    return ratios


class Comparison(NamedTuple):
    """The medians of two programs, their ratio, and between which ratios 90 % of those lie that draws of the same turns
    have. A run that was lost or did not end counts as infinitely long; None if the other median is infinite or 0."""

    ours: float
    theirs: float
    ratio: float | None
    low: float | None
    high: float | None


DRAWS = 2_000
SHARE = 0.9


def compare(pairs: Sequence[tuple[float | None, float | None]]) -> Comparison:
    """Compare the figures of two programs, turn by turn (ours, theirs; None: lost).

    The turns are drawn with replacement, each with both of its runs, so the two ratios say what another measurement of
    as many turns could have found.
    """
    turns = [tuple(math.inf if value is None else value for value in pair) for pair in pairs]
    draw = random.Random(len(turns))
    draws = [_ratio_of_medians(draw.choices(turns, k=len(turns))) for _ in range(DRAWS)]
    ratios = sorted(math.inf if ratio is None else ratio for ratio in draws)
    cut = round(DRAWS * (1 - SHARE) / 2)
    low, high = (None if math.isinf(ratio) else ratio for ratio in (ratios[cut], ratios[-1 - cut]))
    ours, theirs = (statistics.median(side) for side in zip(*turns, strict=True))
    return Comparison(ours, theirs, _ratio_of_medians(turns), low, high)


def _ratio_of_medians(turns: Sequence[tuple[float, ...]]) -> float | None:
    ours, theirs = (statistics.median(side) for side in zip(*turns, strict=True))
    ratio = ours / theirs if 0 < theirs < math.inf else math.inf
    return None if math.isinf(ratio) else ratio


def summarise(
    samples: Sequence[Sample],
    baseline: str,
    targets: Mapping[tuple[str, str], float],
    within: Mapping[str, str] | None = None,
    pairs: Mapping[str, str] | None = None,
) -> list[Row]:
    """A row for each rival and part, in the order in which they first appear.

    A part that the baseline does not have is compared with the baseline's "". `within` maps a part to another part of
    the same run with which it is compared instead. A rival that lost all runs keeps a row for each of its `targets`
    (keyed by rival and part), so that a missed target is always shown. `pairs` maps a rival to its own baseline.
    """
    within, pairs = within or {}, pairs or {}
    rows = []
    for rival in dict.fromkeys(sample.rival for sample in samples):
        own = [sample for sample in samples if sample.rival == rival]
        parts = list(dict.fromkeys(part for sample in own for part in (sample.measured.values or {})))
        for part in parts or [part for name, part in targets if name == rival] or [""]:
            if part in within:
                base = {sample.turn: _reading(sample, within[part]) for sample in own}
            else:
                theirs = [each for each in samples if each.rival == pairs.get(rival, baseline)]
                base = {each.turn: _reading(each, part, otherwise="") for each in theirs}
            rows.append(_row(rival + part, own, part, base, targets.get((rival, part))))
    return rows


def _reading(sample: Sample, part: str, otherwise: str | None = None) -> Reading:
    values = sample.measured.values or {}
    if part not in values and otherwise is not None:
        part = otherwise
    return Reading(values.get(part), part not in sample.measured.unended)


def _row(title: str, samples: Sequence[Sample], part: str, base: Mapping[int, Reading], target: float | None) -> Row:
    readings = {sample.turn: _reading(sample, part) for sample in samples}
    kept = [reading.value for reading in readings.values() if reading.value is not None]
    limits = [reading.value for reading in readings.values() if reading.value is not None and not reading.ended]
    ratios = pair_ratios(readings, base)
    ratio = statistics.median(ratios) if ratios else None
    lost = len(readings) - len(kept) + len(limits)
    notes = Counter(sample.measured.note for sample in samples if sample.measured.note)
    return Row(
        title=title,
        samples=tuple(reading.value for reading in readings.values()),
        lost=lost,
        median=statistics.median(kept) if kept else None,
        low=min(kept, default=None),
        high=max(kept, default=None),
        limit=min(limits, default=None),
        ratio=None if ratio is None else _finite(ratio),
        spread=(_finite(min(ratios)), _finite(max(ratios))) if ratios else None,
        bound=any(turn in base and not base[turn].ended for turn in readings),
        target=target,
        reached=None if target is None or ratio is None else ratio <= target and not lost,
        notes="; ".join(f"{note} ({count}x)" for note, count in notes.items()),
    )


def _finite(ratio: float) -> Ratio:
    return "lost" if math.isinf(ratio) else ratio
