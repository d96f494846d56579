"""The sums of a benchmark, all pure: medians, ratios pair by pair, and whether a target was reached."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One repetition of one rival. `values` has one figure for each part measured ("" is the rival itself).

    `values` None means that the run was lost: it did not do what the case asks for. `unended` are the parts that had
    not come to their end when the driver stopped waiting; their figure is how long it had waited, so the true one is
    greater.
    """

    rival: str
    repetition: int
    values: Mapping[str, float] | None
    note: str = ""
    unended: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Row:
    """One line of a case's table. `samples` are in the order of the repetitions, None where the run was lost.

    `limit` is the shortest time after which the driver stopped waiting for a run of this row, None when all ended.
    `ratio` is the median of the ratios to the baseline, pair by pair; None when there is no pair, and infinite when
    half of this row's runs or more did not end. It is an upper `bound` when a run of the baseline did not end.
    `reached` is None where nothing was asked or nothing can be compared.
    """

    title: str
    samples: tuple[float | None, ...]
    lost: int
    median: float | None
    low: float | None
    high: float | None
    limit: float | None
    ratio: float | None
    bound: bool
    target: float | None
    reached: bool | None
    notes: str


@dataclass(frozen=True)
class Reading:
    """The figure of one part in one repetition: None when the run was lost, a lower bound unless it `ended`."""

    value: float | None
    ended: bool = True


def pair_ratios(ours: Mapping[int, Reading], theirs: Mapping[int, Reading]) -> list[float]:
    """Each repetition's own ratio, so that a load that comes and goes weighs on both sides of a pair.

    A pair whose baseline was lost is left out. A run that was lost or did not end counts as infinite against a baseline
    that did; where neither ended there is nothing to compare.
    """
    ratios = []
    for repetition, own in ours.items():
        base = theirs.get(repetition)
        if base is None or base.value is None or base.value <= 0:
            continue
        if own.value is not None and own.ended:
            ratios.append(own.value / base.value)
        elif base.ended:
            ratios.append(math.inf)
    return ratios


def summarise(
    samples: Sequence[Sample],
    baseline: str,
    targets: Mapping[tuple[str, str], float],
    within: Mapping[str, str] | None = None,
) -> list[Row]:
    """A row for each rival and part, in the order in which they first appear.

    `targets` are keyed by rival and part; a target whose rival lost every run keeps its row, so that it cannot vanish.
    A part that the baseline does not have is compared with the baseline itself. A part that `within` names is compared
    with another part of the same run, whatever the baseline is.
    """
    within = within or {}
    rivals = list(dict.fromkeys(sample.rival for sample in samples))
    rows = []
    for rival in rivals:
        own = [sample for sample in samples if sample.rival == rival]
        parts = list(dict.fromkeys(part for sample in own for part in (sample.values or {})))
        if not parts:
            parts = [part for name, part in targets if name == rival] or [""]
        for part in parts:
            if part in within:
                base = {sample.repetition: _reading(sample, within[part]) for sample in own}
            else:
                base = {
                    sample.repetition: _reading(sample, part, otherwise="")
                    for sample in samples
                    if sample.rival == baseline
                }
            rows.append(_row(rival + part, own, part, base, targets.get((rival, part))))
    return rows


def _reading(sample: Sample, part: str, otherwise: str | None = None) -> Reading:
    values = sample.values or {}
    if part not in values and otherwise is not None:
        part = otherwise
    return Reading(values.get(part), part not in sample.unended)


def _row(title: str, samples: Sequence[Sample], part: str, base: Mapping[int, Reading], target: float | None) -> Row:
    readings = {sample.repetition: _reading(sample, part) for sample in samples}
    kept = [reading.value for reading in readings.values() if reading.value is not None]
    limits = [reading.value for reading in readings.values() if reading.value is not None and not reading.ended]
    ratios = pair_ratios(readings, base)
    ratio = statistics.median(ratios) if ratios else None
    lost = len(readings) - len(kept)
    reached = None if target is None or ratio is None else ratio <= target and not lost and not limits
    notes = Counter(sample.note for sample in samples if sample.note)
    return Row(
        title=title,
        samples=tuple(reading.value for reading in readings.values()),
        lost=lost + len(limits),
        median=statistics.median(kept) if kept else None,
        low=min(kept, default=None),
        high=max(kept, default=None),
        limit=min(limits, default=None),
        ratio=ratio,
        bound=any(repetition in base and not base[repetition].ended for repetition in readings),
        target=target,
        reached=reached,
        notes="; ".join(f"{note} ({count}x)" for note, count in notes.items()),
    )
