"""The rhythm of a task's steps: how long one takes, and how long the pauses between them are. Pure: it takes counts and
the times at which they were reached, and knows no clock.

It is the one estimate of a step: what a node reports, `status` shows and a hang is measured by.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

KEPT = 64
"""The number of observations that a rhythm is computed from. Older ones are forgotten, as steps change with the data
and with the schedule of the training."""

MIN_OBSERVATIONS = 3
"""With fewer there is no period: the first step of a job compiles and loads."""

MIN_PAUSES = 5
"""Pauses with which it is known how long they are."""


class _Mean(NamedTuple):
    """The mean time of a step between two observations."""

    seconds: float
    steps: int


class Rhythm:
    """The rhythm of one worker in one round; it forgets everything when a new round begins.

    An observation is the count of steps and the time, in seconds, at which that count was reached, which need not be
    the time of the observation. So the period is right however rarely it is observed. A pause is exact only if every
    step is observed; otherwise it is too long by at most the time between two observations.
    """

    def __init__(self) -> None:
        self._round: Hashable = None
        self._forget()

    def _forget(self) -> None:
        self._means: deque[_Mean] = deque(maxlen=KEPT)
        self._pauses: deque[float] = deque(maxlen=KEPT)
        self._last: tuple[int, float] | None = None

    def observe(self, round_: Hashable, count: int, at: float) -> bool:
        """Add an observation; whether there is another count than before. One of another round forgets all others. A
        count that has gone back begins anew: another source counts now."""
        if round_ != self._round:
            self._round = round_
            self._forget()
        last, self._last = self._last, (count, at)
        if last is None:
            return False
        steps, seconds = count - last[0], at - last[1]
        if steps == 0 or (steps > 0 and seconds < 0):
            self._last = last
            return False
        self._pauses.append(max(0.0, seconds))
        if steps > 0:
            self._means.append(_Mean(seconds / steps, steps))
        return True

    def shift(self, seconds: float) -> None:
        """Leave out a time in which the whole machine was frozen."""
        if self._last is not None:
            self._last = self._last[0], self._last[1] + seconds

    @property
    def counts(self) -> bool:
        """Whether anything counts steps."""
        return self._last is not None

    @property
    def period(self) -> float | None:
        """The seconds of one step, the median; None as long as too little is known."""
        return _median(self._means) if len(self._means) >= MIN_OBSERVATIONS else None

    @property
    def knows_pauses(self) -> bool:
        """Whether it is known how long pauses are."""
        return len(self._pauses) >= MIN_PAUSES

    @property
    def longest_pause(self) -> float:
        """The longest time between two counts, 0 before the second one: an evaluation or a checkpoint between two steps
        is part of the rhythm."""
        return max(self._pauses, default=0.0)


def _median(means: Sequence[_Mean]) -> float:
    """The median, weighted by steps: half of all steps took no longer."""
    half, reached = sum(mean.steps for mean in means) / 2, 0
    for mean in sorted(means):
        reached += mean.steps
        if reached >= half:
            return mean.seconds
    raise ValueError("the median of nothing")
