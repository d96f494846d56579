"""The rhythm of a task's steps: the time that one takes, and how much it varies. Pure: it takes counts and the times at
which they were reached, and knows no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

KEPT = 64
"""The number of observations that a period is computed from. Older ones are forgotten, as steps change with the data
and with the schedule of the training."""

MIN_OBSERVATIONS = 3
"""With fewer there is no period: the first step of a job compiles and loads."""


class Period(NamedTuple):
    """The seconds of one step: the median, and the median distance from it. `longest` is the longest time in this round
    between two counts, for one that was seen: an evaluation or a checkpoint between two steps is part of the rhythm."""

    seconds: float
    spread: float
    longest: float


class _Mean(NamedTuple):
    """The mean time of a step between two observations."""

    seconds: float
    steps: int


class Rhythm:
    """The rhythm of one worker in one round; it forgets everything when a new round begins.

    An observation is the count of steps and the time, in seconds, at which that count was reached, which need not be
    the time of the observation. So the period is right however rarely it is observed. `longest` is exact only if every
    step is observed; otherwise it is at most the true one.
    """

    def __init__(self) -> None:
        self._round: Hashable = None
        self._forget()

    def _forget(self) -> None:
        self._means: deque[_Mean] = deque(maxlen=KEPT)
        self._longest = 0.0
        self._last: tuple[int, float] | None = None

    def observe(self, round_: Hashable, count: int, at: float) -> None:
        """Add an observation. One of another round forgets all others. A count that has gone back begins anew: another
        source counts now."""
        if round_ != self._round:
            self._round = round_
            self._forget()
        if self._last is not None:
            steps, seconds = count - self._last[0], at - self._last[1]
            if steps == 0 or (steps > 0 and seconds < 0):
                return
            if steps > 0:
                mean = _Mean(seconds / steps, steps)
                self._means.append(mean)
                self._longest = max(self._longest, mean.seconds)
        self._last = (count, at)

    @property
    def period(self) -> Period | None:
        """The period; None as long as too little is known."""
        if len(self._means) < MIN_OBSERVATIONS:
            return None
        seconds = _median(self._means)
        spread = _median([_Mean(abs(mean.seconds - seconds), mean.steps) for mean in self._means])
        return Period(seconds, spread, self._longest)


def _median(means: Sequence[_Mean]) -> float:
    """The median, weighted by steps: half of all steps took no longer."""
    half, reached = sum(mean.steps for mean in means) / 2, 0
    for mean in sorted(means):
        reached += mean.steps
        if reached >= half:
            return mean.seconds
    raise ValueError("the median of nothing")
