"""Samples the progress of this node's tasks at intervals, if something listens and as long as a task runs.

Without a listener there is no timer, and no page is read.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

from dlrover_run.progress.page import Progress
from dlrover_run.progress.rhythm import Period, Rhythm

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
