"""Which size to try next, from the sizes that were measured.

On logarithmic scales throughput over size is concave in almost all jobs: each doubling gives at most as much as the
one before. So what is measured bounds what is not: between two sizes, the lines through the sizes on either side;
beyond the largest, the line through the last two. The size with the greatest bound is tried, if that is worth it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from dlrover_run.features.autoscale.model import MAX_CRASHES, SizeRecord, Sizes

STEEPEST = 1.0
"""The slope of throughput over size that no job exceeds: twice the nodes do twice the work."""


class Candidate(NamedTuple):
    """A size, and how much more utility it may have at most than the best one that was measured, as a logarithm."""

    size: int
    gain: float


class _Point(NamedTuple):
    """A size that was measured, on logarithmic scales."""

    nodes: int
    size: float
    rate: float
    error: float


def utility(record: SizeRecord, efficiency: float) -> float:
    """The logarithm of the utility of a size that was measured."""
    return record.rate - efficiency * math.log(record.size)


def efficiency_of(small: SizeRecord, large: SizeRecord) -> float:
    """The share of the larger size that became throughput."""
    return (large.rate - small.rate) / math.log(large.size / small.size)


def best_size(measured: Sequence[SizeRecord], efficiency: float, tolerance: float) -> SizeRecord:
    """The size with the greatest utility; of sizes that hardly differ in it, the smallest."""
    best = max(measured, key=lambda record: utility(record, efficiency))
    greatest = utility(best, efficiency)
    for record in sorted(measured, key=lambda record: record.size):
        margin = min(tolerance / 2, math.hypot(record.error, best.error))
        if utility(record, efficiency) >= greatest - margin:
            return record
    return best


def next_size(
    sizes: Sizes, highest: int, measured: Sequence[SizeRecord], bad: Sequence[int], efficiency: float, best: SizeRecord
) -> Candidate | None:
    """The size with the most to gain, None if there is none. `highest` is the largest that can be had, and `bad` are
    those at which workers fail."""
    points = sorted(_Point(one.size, math.log(one.size), one.rate, one.error) for one in measured)
    greatest = utility(best, efficiency)
    found = [*_above(sizes, highest, points, bad, efficiency, greatest)]
    found += _below(sizes, points, bad, efficiency, greatest)
    for place, (left, right) in enumerate(pairwise(points)):
        slope = _slope(left, right)
        rise = max(slope, min(STEEPEST, _slope(points[place - 1], left)) if place else STEEPEST)
        # Where nothing is known beyond, the knee is tried from which on nothing is gained, or else the middle.
        fall = _slope(right, points[place + 2]) if place + 2 < len(points) else min(0.0, 2 * slope - rise)
        found += _between(sizes, left, right, rise, min(fall, slope), bad, efficiency, greatest)
    # Of equal gains the first, which is the largest size.
    return max((one for one in found if one.size <= highest), key=lambda one: round(one.gain, 9), default=None)


def _slope(left: _Point, right: _Point) -> float:
    return (right.rate - left.rate) / (right.size - left.size)


def _above(
    sizes: Sizes, highest: int, points: Sequence[_Point], bad: Sequence[int], efficiency: float, greatest: float
) -> Iterator[Candidate]:
    """Sizes beyond the largest that was measured: twice that, or less if workers fail there."""
    last = points[-1]
    walls = sorted(one for one in bad if one > last.nodes)
    end = min(2 * last.nodes, highest)
    if len(walls) >= MAX_CRASHES:
        return
    if walls and walls[0] <= end:
        end = max(round(math.sqrt(last.nodes * walls[0])), last.nodes + sizes.unit)
        end = end if sizes.below(end) not in walls else min(2 * walls[0], highest)
    size = sizes.below(end)
    if size <= last.nodes or size in bad:
        return
    rise = STEEPEST
    if len(points) > 1:
        before = points[-2]
        width = last.size - before.size
        rise = min(STEEPEST, _slope(before, last) + math.hypot(before.error, last.error) / width)
    gain = last.rate + (rise - efficiency) * (math.log(size) - last.size) - efficiency * last.size - greatest
    yield Candidate(size, gain)


def _below(
    sizes: Sizes, points: Sequence[_Point], bad: Sequence[int], efficiency: float, greatest: float
) -> Iterator[Candidate]:
    """Sizes below the smallest that was measured: half of it, or more if workers fail there."""
    first = points[0]
    walls = sorted((one for one in bad if one < first.nodes), reverse=True)
    if len(walls) >= MAX_CRASHES:
        return
    size = sizes.below(max(first.nodes / 2, sizes.fewest))
    if walls and walls[0] >= size:
        size = max(sizes.below(math.sqrt(first.nodes * walls[0])), walls[0] + sizes.unit)
        size = size if size < first.nodes else sizes.below(max(walls[0] / 2, sizes.fewest))
    if size >= first.nodes or size in bad:
        return
    fall = 0.0
    if len(points) > 1:
        after = points[1]
        width = after.size - first.size
        fall = _slope(first, after) - math.hypot(first.error, after.error) / width
    gain = first.rate - (fall - efficiency) * (first.size - math.log(size)) - efficiency * first.size - greatest
    yield Candidate(size, gain)


def _between(
    sizes: Sizes,
    left: _Point,
    right: _Point,
    rise: float,
    fall: float,
    bad: Sequence[int],
    efficiency: float,
    greatest: float,
) -> Iterator[Candidate]:
    """The sizes next to where the bounds from both sides meet."""
    if right.nodes - left.nodes <= sizes.unit or rise - fall < 1e-9:
        return
    width = right.size - left.size
    across = (right.rate - left.rate - fall * width) / (rise - fall)
    low = sizes.below(math.exp(left.size + min(width, max(0.0, across))) + 1e-9)
    for size in (low - sizes.unit, low, low + sizes.unit, low + 2 * sizes.unit):
        if left.nodes < size < right.nodes and size not in bad:
            place = math.log(size)
            bound = min(left.rate + rise * (place - left.size), right.rate - fall * (right.size - place))
            yield Candidate(size, bound - efficiency * place - greatest)
