"""One timer for all that looks at the tasks of this node while they run, and one sample of them for all.

Each consumer says after each sample how soon it wants the next one. Without a consumer, and while no task runs, there
is no timer, and no page is read. An exception in a consumer ends neither it nor the others: it is reported, and the
consumer gets another sample RETRY_INTERVAL later.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Hashable, Mapping
from typing import Any, NamedTuple

from dlrover_run.background import Background
from dlrover_run.observe.page import Progress
from dlrover_run.observe.rhythm import Rhythm

SAMPLE_INTERVAL = 1.0
"""Seconds from one sample to the next for a consumer that needs no other: a page has the time of its last step, so the
period of the steps is as exact as with one sample a step."""

RETRY_INTERVAL = 10.0
"""Seconds until a consumer that has failed gets another sample: what has failed once may do so for some time."""

EARLY = 0.3
"""The part of its interval by which a consumer may get a sample early, together with another one."""


class Activity(NamedTuple):
    """What a task has done, and the seconds of one of its steps in this round; None as long as they are not known."""

    progress: Progress
    period: float | None


Activities = Mapping[str, Activity]
"""By the name of the task; one that has reported no step is left out."""

Take = Callable[[Activities], float | Coroutine[Any, Any, float]]
"""Takes a sample, and returns after how many seconds it wants the next one, perhaps only when its work is done."""


class Consumer:
    """What takes samples, until `close`. `name` says in a message what does not work if it fails."""

    def __init__(self, tick: Tick, name: str, take: Take, first: float, early: float) -> None:
        self.name = name
        self.take = take
        self.first = first
        self.early = early
        self.due = 0.0
        self.is_failing = False
        self.work: asyncio.Task[None] | None = None
        self._tick = tick

    def close(self) -> None:
        """Take no more samples, and cancel the work with the last one. Idempotent."""
        self._tick.remove(self)


class Tick:
    """To be used in the thread of a running loop. `read` returns the progress of each task by its name. `failed` is
    called with the name of a consumer and its exception whenever one begins to fail."""

    def __init__(self, read: Callable[[], Mapping[str, Progress]], failed: Callable[[str, Exception], None]) -> None:
        self.latest: Activities = {}
        """The last sample."""
        self._read = read
        self._failed = failed
        self._background = Background(lambda error: failed("the timer", error))
        self._rhythms: defaultdict[str, Rhythm] = defaultdict(Rhythm)
        self._consumers: list[Consumer] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._round: Hashable = None
        self._running = False

    def add(self, name: str, take: Take, *, first: float = 0.0, early: float = 0.0) -> Consumer:
        """Give samples to another consumer: the `first` one that number of seconds after the tasks have begun to run,
        or after now if they run. It may get each up to `early` seconds before it wants it."""
        consumer = Consumer(self, name, take, first, early)
        if self._running:
            consumer.due = asyncio.get_running_loop().time() + first
        self._consumers.append(consumer)
        self._arm()
        return consumer

    def remove(self, consumer: Consumer) -> None:
        if consumer in self._consumers:
            self._consumers.remove(consumer)
        if consumer.work is not None:
            consumer.work.cancel()
        self._arm()

    def follow(self, round_: Hashable, running: bool) -> None:
        """Note which round the tasks belong to, and whether any runs. The agent calls it in each turn of its loop."""
        if round_ != self._round:
            self._round = round_
            self._rhythms.clear()
            self.latest = {}
        if running and not self._running:
            now = asyncio.get_running_loop().time()
            for consumer in self._consumers:
                consumer.due = now + consumer.first
        self._running = running
        self._arm()

    def sample(self) -> Activities:
        """Read the progress now, whether anything wants it or not."""
        activities: dict[str, Activity] = {}
        for name, progress in self._read().items():
            # Counts of two sources have nothing in common.
            self._rhythms[name].observe((self._round, progress.source), progress.steps, progress.at / 1e9)
            activities[name] = Activity(progress, self._rhythms[name].period)
        self.latest = activities
        return activities

    def close(self) -> None:
        """Give no more samples. Idempotent."""
        self._running = False
        for consumer in list(self._consumers):
            self.remove(consumer)
        self._arm()

    def _arm(self) -> None:
        waiting = [consumer.due for consumer in self._consumers if consumer.work is None] if self._running else []
        at = min(waiting, default=None)
        if self._timer is not None:
            if self._timer_at == at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = None if at is None else asyncio.get_running_loop().call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        due = [one for one in self._consumers if one.work is None and one.due - one.early <= now]
        try:
            sample = self.sample()
        except Exception as error:
            for consumer in due:
                self._note_failure(consumer, error)
        else:
            for consumer in due:
                self._give(consumer, sample)
        self._arm()

    def _give(self, consumer: Consumer, sample: Activities) -> None:
        try:
            wish = consumer.take(sample)
        except Exception as error:
            self._note_failure(consumer, error)
            return
        if isinstance(wish, int | float):
            self._note_success(consumer, wish)
        else:
            consumer.work = self._background.start(self._finish(consumer, wish))
            # One that is cancelled before its first step has not awaited it, and Python would warn of that.
            consumer.work.add_done_callback(lambda _: wish.close())

    async def _finish(self, consumer: Consumer, wish: Coroutine[Any, Any, float]) -> None:
        try:
            self._note_success(consumer, await wish)
        except Exception as error:
            self._note_failure(consumer, error)
        finally:
            consumer.work = None
            self._arm()

    def _note_success(self, consumer: Consumer, seconds: float) -> None:
        consumer.is_failing = False
        consumer.due = asyncio.get_running_loop().time() + seconds

    def _note_failure(self, consumer: Consumer, error: Exception) -> None:
        consumer.due = asyncio.get_running_loop().time() + RETRY_INTERVAL
        if not consumer.is_failing:
            consumer.is_failing = True
            self._failed(consumer.name, error)
