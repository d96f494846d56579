"""The sums of the benchmark, all pure: medians, ratios pair by pair, and whether a target was reached."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One repetition of one rival. `values` has one figure for each part measured ("" is the rival itself).

    `values` None means that the run was lost: it did not do what the case asks for within its time.
    """

    rival: str
    repetition: int
    values: Mapping[str, float] | None
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One line of a case's table. `samples` are in the order of the repetitions, None where the run was lost.

    `ratio` is the median of the ratios to the baseline, pair by pair; None when there is no pair, and infinite when
    half of this row's runs or more were lost. `reached` is None where nothing was asked or nothing can be compared.
    """

    title: str
    samples: tuple[float | None, ...]
    lost: int
    median: float | None
    low: float | None
    high: float | None
    ratio: float | None
    target: float | None
    reached: bool | None
    notes: str


def pair_ratios(ours: Sequence[tuple[int, float | None]], theirs: Mapping[int, float | None]) -> list[float]:
    """Each repetition's own ratio, so that a load that comes and goes weighs on both sides of a pair.

    A pair whose baseline was lost is left out; a run that was lost against a baseline that was not counts as infinite.
    """
    ratios = []
    for repetition, value in ours:
        base = theirs.get(repetition)
        if base is None or base <= 0:
            continue
        ratios.append(math.inf if value is None else value / base)
    return ratios


def summarise(samples: Sequence[Sample], baseline: str, targets: Mapping[tuple[str, str], float]) -> list[Row]:
    """A row for each rival and part, in the order in which they first appear.

    `targets` are keyed by rival and part; a target whose rival lost every run keeps its row, so that it cannot vanish.
    A part that the baseline does not have is compared with the baseline itself.
    """
    rivals = list(dict.fromkeys(sample.rival for sample in samples))
    rows = []
    for rival in rivals:
        own = [sample for sample in samples if sample.rival == rival]
        parts = list(dict.fromkeys(part for sample in own for part in (sample.values or {})))
        if not parts:
            parts = [part for name, part in targets if name == rival] or [""]
        for part in parts:
            base = {
                sample.repetition: None if sample.values is None else sample.values.get(part, sample.values.get(""))
                for sample in samples
                if sample.rival == baseline
            }
            rows.append(_row(rival + part, own, part, base, targets.get((rival, part))))
    return rows


def _row(
    title: str, samples: Sequence[Sample], part: str, base: Mapping[int, float | None], target: float | None
) -> Row:
    values = [(sample.repetition, None if sample.values is None else sample.values.get(part)) for sample in samples]
    kept = [value for _, value in values if value is not None]
    ratios = pair_ratios(values, base)
    ratio = statistics.median(ratios) if ratios else None
    lost = len(values) - len(kept)
    reached = None if target is None or ratio is None else ratio <= target and lost == 0
    notes = Counter(sample.note for sample in samples if sample.note)
    return Row(
        title=title,
        samples=tuple(value for _, value in values),
        lost=lost,
        median=statistics.median(kept) if kept else None,
        low=min(kept, default=None),
        high=max(kept, default=None),
        ratio=ratio,
        target=target,
        reached=reached,
        notes="; ".join(f"{note} ({count}x)" for note, count in notes.items()),
    )
