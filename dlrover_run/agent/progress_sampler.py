"""Samples the progress of this node's tasks at intervals, as long as something listens and a task runs.

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
    """To be used in the thread of a running loop. `read` returns the progress of each task by its name."""

    def __init__(self, read: Callable[[], Mapping[str, Progress]], interval: float = SAMPLE_INTERVAL) -> None:
        self._read = read
        self._interval = interval
        self._rhythms: defaultdict[str, Rhythm] = defaultdict(Rhythm)
        self._listeners: list[Callable[[Activities], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._running = False
        self._round: Hashable = None

    def listen(self, listener: Callable[[Activities], None]) -> Callable[[], None]:
        """Have `listener` called with each sample from now on; returns the function that ends this."""
        self._listeners.append(listener)
        self._schedule()

        def stop() -> None:
            self._listeners.remove(listener)
            self._schedule()

        return stop

    def follow(self, round_: Hashable, running: bool) -> None:
        """Note which round the tasks belong to, and whether any runs. Idempotent."""
        if round_ != self._round:
            self._round = round_
            self._rhythms.clear()
        self._running = running
        self._schedule()

    def sample(self) -> Activities:
        """Read the progress now, whether anything listens or not."""
        return {name: self._observe(name, progress) for name, progress in self._read().items()}

    def close(self) -> None:
        """End all listening."""
        self._listeners.clear()
        self._schedule()

    def _observe(self, name: str, progress: Progress) -> Activity:
        rhythm = self._rhythms[name]
        # Counts of two sources have nothing in common.
        rhythm.observe((self._round, progress.source), progress.steps, progress.at / 1e9)
        return Activity(progress, rhythm.period)

    def _schedule(self) -> None:
        wanted = self._running and bool(self._listeners)
        if wanted and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._on_timer)
        elif not wanted and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        activities = self.sample()
        for listener in tuple(self._listeners):
            listener(activities)
        self._schedule()
