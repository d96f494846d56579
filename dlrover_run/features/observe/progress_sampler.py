"""Samples the progress of this node's tasks at intervals, if something listens and as long as a task runs.

Without a listener there is no timer, and no page is read. The samples show the rhythm of a task's steps: the time that
one takes, and how much it varies. `Rhythm` is pure: it takes counts and the times at which they were reached, and knows
no clock.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from dlrover_run.features.observe.page import Progress

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


SAMPLE_INTERVAL = 1.0
"""Seconds from one sample to the next. A page has the time of its last step, so the period of the steps is as exact as
with one sample a step."""


class Activity(NamedTuple):
    """What a task has done, and the period of its steps in this round; None as long as it is not known."""

    progress: Progress
    period: Period | None


Activities = Mapping[str, Activity]
"""By the name of the task; one that has reported no step is left out."""


class ProgressSampler:
    """To be used in the thread of a running loop. `read` returns the progress of each task by its name; `listener` is
    called after each sample."""

    def __init__(self, read: Callable[[], Mapping[str, Progress]], listener: Callable[[], None] | None = None) -> None:
        self._read = read
        self._listener = listener
        self._rhythms: defaultdict[str, Rhythm] = defaultdict(Rhythm)
        self._timer: asyncio.TimerHandle | None = None
        self._round: Hashable = None

    def follow(self, round_: Hashable, running: bool) -> None:
        """Note which round the tasks belong to, and whether any runs. Idempotent."""
        if round_ != self._round:
            self._round = round_
            self._rhythms.clear()
        if not running:
            self.close()
        elif self._timer is None and self._listener is not None:
            self._timer = asyncio.get_running_loop().call_later(SAMPLE_INTERVAL, self._on_timer)

    def sample(self) -> Activities:
        """Read the progress now, whether anything listens or not."""
        activities: dict[str, Activity] = {}
        for name, progress in self._read().items():
            # Counts of two sources have nothing in common.
            self._rhythms[name].observe((self._round, progress.source), progress.steps, progress.at / 1e9)
            activities[name] = Activity(progress, self._rhythms[name].period)
        return activities

    def close(self) -> None:
        """Take no more samples by itself."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        self.sample()
        if self._listener is not None:
            self._listener()
        self.follow(self._round, running=True)
