"""The progress of nodes and the times of a job, made from what the tasks report. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from dlrover_run.coordination.records.activity import WAITS, PhaseTimes, TaskActivity


class HangingTask(msgspec.Struct, frozen=True):
    """A task that makes no progress, and for which others may wait; `cause` is a code."""

    name: str
    cause: str


class NodeProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of one node, as a status shows it. `steps` and `step_seconds` are those of the task with the fewest
    steps, `data_wait` is the longest of any task, and `idle` the seconds since the last step of any; None where it is
    not known, and a task that makes no progress has no pace. `stalled` names the tasks that make no progress, and
    `hangs` those of them that do not only wait for another one; these wait in the operation `awaited`, if that is
    known."""

    steps: int
    step_seconds: float | None = None
    data_wait: float | None = None
    idle: float | None = None
    stalled: tuple[str, ...] = ()
    hangs: tuple[HangingTask, ...] = ()
    awaited: str = ""


def job_times(received: Iterable[tuple[PhaseTimes, float]]) -> tuple[dict[str, float], dict[str, int]]:
    """The seconds of the workers of a job by phase, and how many are in each phase now, from the times of nodes and for
    how long each of these goes on since it was received."""
    seconds: dict[str, float] = defaultdict(float)
    places: dict[str, int] = defaultdict(int)
    for times, age in received:
        for phase, spent in times.seconds.items():
            seconds[phase] += spent
        for phase, number in times.places.items():
            seconds[phase] += number * age
            places[phase] += number
    return {phase: round(spent, 3) for phase, spent in seconds.items()}, dict(places)


def node_progress(tasks: Sequence[TaskActivity], age: float | None, awaited: str = "") -> NodeProgress | None:
    """The progress of a node whose tasks have reported this `age` seconds ago, None if that is not known; None without
    a task. `awaited` is that of its activity."""
    if not tasks:
        return None
    slowest = min(tasks, key=lambda task: task.steps)
    waits = [task.data_wait for task in tasks if task.data_wait is not None]
    stepped = [task.idle for task in tasks if task.steps]
    return NodeProgress(
        steps=slowest.steps,
        step_seconds=None if slowest.stalled else slowest.period,
        data_wait=max(waits, default=None),
        idle=round(min(stepped) + age, 3) if stepped and age is not None else None,
        stalled=tuple(task.name for task in tasks if task.stalled),
        hangs=tuple(HangingTask(task.name, task.stalled) for task in tasks if task.stalled not in ("", WAITS)),
        awaited=awaited if any(task.stalled for task in tasks) else "",
    )
