"""The throughput of one size: the progress of a round becomes blocks, and these an estimate with its error.

Blocks are about equally long, and compared as logarithms, so that an error is a share. An estimate is the mean of the
blocks, each of which counts for at most a few times the usual distance from the median: an evaluation or a checkpoint
in one block must not decide. Its error takes into account that successive blocks resemble each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from operator import mul
from statistics import fmean, median
from typing import NamedTuple

from msgspec.structs import replace

from dlrover_run.features.autoscale.model import MAX_BLOCKS, AutoscaleState, Measurement, StepsReport
from dlrover_run.features.autoscale.rules import STRONG, AutoscaleRules

MIN_BLOCKS = 6
"""With fewer blocks there is no estimate."""

WARM_UP_STEPS = 3
"""Steps of a round that are not measured, however fast they are: the first ones compile, load and connect."""

OUTLIER = 2.5
"""How many times the usual distance from the median a block counts at most."""

RECENT = 32
"""Blocks that show whether a size still has the throughput that was measured."""


class Estimate(NamedTuple):
    """The logarithm of the work per second, and its standard error."""

    rate: float
    error: float
    blocks: int


def work_done(rules: AutoscaleRules, size: int, progress: StepsReport) -> float:
    """The work of a round, comparable between sizes: samples, or what stands for them."""
    if progress.samples is not None:
        return float(progress.samples)
    return float(progress.steps if rules.scaling == STRONG else progress.steps * size)


def remaining_seconds(
    rules: AutoscaleRules, state: AutoscaleState, size: int, progress: StepsReport | None
) -> float | None:
    """For how many seconds the job has still to train with the size that trains; None if that is not known."""
    if progress is None or progress.left is None:
        return None
    now = state.measurement
    rates = [*now.blocks] if now.size == size else []
    rates = rates or [one.rate for one in state.table if one.size == size and one.blocks]
    if not rates:
        return None
    left = StepsReport(progress.left, 0.0, None if progress.samples is None else progress.left)
    return work_done(rules, size, left) / math.exp(median(rates))


def observe(
    rules: AutoscaleRules, before: Measurement, round_: int, size: int, progress: StepsReport | None, slide: bool
) -> Measurement:
    """The measurement with what the round has done since. It continues with another round of the same size. With
    `slide` only the most recent blocks are kept; else all of them, of growing length."""
    now = before
    if before.size != size:
        now = Measurement(round=round_, size=size)
    elif before.round != round_:
        now = replace(before, round=round_, first_at=None, at=None)
    if progress is None or progress.steps <= 0:
        return now
    if now.first_at is None:
        return replace(now, first_at=progress.at, steps=progress.steps)
    if now.at is None:
        if progress.at - now.first_at < rules.warm_up or progress.steps - now.steps < WARM_UP_STEPS:
            return now
        return _begin(now, rules, progress)
    if progress.steps < now.steps:
        # Another source counts now.
        return _begin(now, rules, progress)
    seconds, work = progress.at - now.at, work_done(rules, now.size, progress) - now.work
    if progress.steps == now.steps or seconds < (now.seconds or rules.block) or work <= 0:
        return now
    blocks = (*now.blocks, math.log(work / seconds))
    if slide:
        blocks = blocks[-RECENT:]
    elif len(blocks) >= MAX_BLOCKS:
        clipped = _clip(blocks)
        blocks = tuple(fmean(clipped[place : place + 2]) for place in range(0, len(clipped) - 1, 2))
        now = replace(now, seconds=2 * (now.seconds or rules.block))
    return _begin(replace(now, blocks=blocks, measured=now.measured + seconds), rules, progress)


def _begin(now: Measurement, rules: AutoscaleRules, progress: StepsReport) -> Measurement:
    return replace(now, steps=progress.steps, work=work_done(rules, now.size, progress), at=progress.at)


@lru_cache(maxsize=4)
def estimate(blocks: tuple[float, ...]) -> Estimate | None:
    """The estimate of these blocks; None if there are too few. Cached, as several decisions follow one new block."""
    number = len(blocks)
    if number < MIN_BLOCKS:
        return None
    clipped = _clip(blocks)
    mean = fmean(clipped)
    rest = [value - mean for value in clipped]
    squares = sum(map(mul, rest, rest))
    if not squares:
        return Estimate(mean, 0.0, number)
    alike = sum(map(mul, rest, rest[1:])) / squares
    # A short series shows less of a correlation than there is.
    alike = min(0.9, max(0.0, alike + (1 + 4 * max(0.0, alike)) / number))
    variance = squares / (number - 1) / number * (1 + alike) / (1 - alike)
    # Student's t is wider than the normal distribution for few blocks.
    return Estimate(mean, math.sqrt(variance) * (1 + 2 / number), number)


def _clip(blocks: Sequence[float]) -> list[float]:
    middle = median(blocks)
    usual = 1.4826 * median([abs(value - middle) for value in blocks])
    if not usual:
        return list(blocks) if max(blocks) - min(blocks) < 1e-9 else [middle] * len(blocks)
    low, high = middle - OUTLIER * usual, middle + OUTLIER * usual
    return [low if value < low else high if value > high else value for value in blocks]
