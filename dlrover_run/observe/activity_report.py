"""When this node reports what its tasks do: at most once a second, and only if its meaning has changed. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import msgspec

from dlrover_run.coordination.records.activity import (
    MAX_TASKS,
    MemoryUse,
    NodeActivity,
    PhaseTimes,
    TaskActivity,
)
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.resource_use import NodeUse, rounded
from dlrover_run.observe.tick import Activities

MIN_INTERVAL = 1.0
"""Seconds between two reports for a change of meaning."""

REFRESH_INTERVAL = 5.0
"""Seconds after which the number of steps alone is reported again, where the backend of the job does not say: as often
as a heartbeat."""

PACE_CHANGE = 1.25
"""The factor by which the time of a step changes its meaning."""

WAIT_CHANGE = 0.2
"""The change of the share of waiting that is one of meaning."""


def with_activity(report: NodeReport, activity: NodeActivity | None, times: PhaseTimes | None = None) -> NodeReport:
    """The report with what the tasks do, and where their time went."""
    if times is not None:
        activity = msgspec.structs.replace(activity or NodeActivity(()), times=times)
    return report if activity is None else msgspec.structs.replace(report, activity=activity)


class ActivityReport:
    """The activity that this node reports: `current`. Times are those of one monotonic clock, in seconds."""

    def __init__(self, refresh: float) -> None:
        self.current: NodeActivity | None = None
        self._refresh = refresh
        self._round: Hashable = None
        self._reported_at = float("-inf")
        self._waited: dict[str, tuple[float, float]] = {}

    def follow_round(self, round_: Hashable, running: bool) -> None:
        """Note which round the tasks belong to, and whether any runs: nothing is reported of an earlier round."""
        if round_ != self._round or not running:
            self._round = round_
            self._forget()

    def take(
        self,
        activities: Activities,
        stalled: Mapping[str, str],
        now: float,
        memory: MemoryUse | None = None,
        watch_problem: str = "",
        ended: Sequence[str] = (),
        use: NodeUse | None = None,
        awaited: str = "",
    ) -> bool:
        """Take what the tasks do, the codes of those that are stalled, what their checkpoints take in memory, why
        none of them is looked at, if so, which have ended, what they use, and the operation in which stalled ones wait;
        whether `current` has changed."""
        if now - self._reported_at < MIN_INTERVAL:
            return False
        names = list(dict.fromkeys([*activities, *stalled]))[:MAX_TASKS]
        tasks = tuple(self._task(name, activities, stalled, now) for name in names)
        gone = tuple(ended)[:MAX_TASKS]
        has_any = tasks or memory is not None or watch_problem or gone or use is not None
        found = None
        if has_any:
            use = None if use is None else rounded(use)
            found = NodeActivity(tasks, memory, watch_problem=watch_problem, awaited=awaited, ended=gone, use=use)
        before = self.current
        is_news = before is None or found is None or _means_more(before, found)
        is_old = now - self._reported_at >= self._refresh
        if found == before or not (is_news or is_old):
            return False
        self.current = found
        self._reported_at = now
        self._waited = {name: (now, done.progress.waited) for name, done in activities.items()}
        return True

    def _forget(self) -> None:
        self.current = None
        self._reported_at = float("-inf")
        self._waited = {}

    def _task(self, name: str, activities: Activities, stalled: Mapping[str, str], now: float) -> TaskActivity:
        done = activities.get(name)
        code = stalled.get(name, "")
        if done is None:
            return TaskActivity(name=name, stalled=code)
        progress, period = done
        return TaskActivity(
            name=name,
            steps=progress.steps,
            period=None if period is None else float(f"{period:.3g}"),
            data_wait=self._data_wait(name, progress.waited, now),
            idle=round(max(0.0, now - progress.at / 1e9), 1),
            stalled=code,
        )

    def _data_wait(self, name: str, waited: float, now: float) -> float | None:
        """The share of the time since the last report; None if nothing counts the waiting."""
        since, before = self._waited.get(name, (now, waited))
        if not waited or now <= since:
            return None
        return round(min(1.0, max(0.0, (waited - before) / (now - since))), 2)


def _means_more(before: NodeActivity, now: NodeActivity) -> bool:
    """Whether a reader of these figures would conclude something else, leaving out how many steps there are."""
    if len(before.tasks) != len(now.tasks) or (before.memory is None) != (now.memory is None):
        return True
    if (before.use is None) != (now.use is None):
        return True
    if (before.watch_problem, before.awaited, before.ended) != (now.watch_problem, now.awaited, now.ended):
        return True
    return any(_differs(one, other) for one, other in zip(before.tasks, now.tasks, strict=True))


def _differs(before: TaskActivity, now: TaskActivity) -> bool:
    if (before.name, before.stalled, bool(before.steps)) != (now.name, now.stalled, bool(now.steps)):
        return True
    if (before.period is None) != (now.period is None) or now.steps < before.steps:
        return True
    if before.period and now.period:
        ratio = now.period / before.period
        if not 1 / PACE_CHANGE <= ratio <= PACE_CHANGE:
            return True
    if before.data_wait is None or now.data_wait is None:
        return False
    return abs(before.data_wait - now.data_wait) >= WAIT_CHANGE
