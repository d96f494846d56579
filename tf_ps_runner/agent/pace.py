"""What this node reports to a job that chooses its own size, as often as its order says: the steps of the job, if the
chief is here, and what the parameter servers here use of their processors and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from dlrover_run.background import Background, every
from dlrover_run.devices.capacity import usable_memory, usable_processors
from dlrover_run.processes import tree
from tf_ps_runner.cluster.choice import MAX_PERCENT
from tf_ps_runner.cluster.model import Role
from tf_ps_runner.cluster.orders import NodeOrder
from tf_ps_runner.cluster.reports import NodeTasks, Pace, ServerLoad
from tf_ps_runner.cluster.rules import ROLES
from tf_ps_runner.memory.watch import cpu_seconds


class SeenTask(NamedTuple):
    """A task of this node whose process runs. `step` is its last global step, and `stepped_at` when it reported that,
    as `time.monotonic_ns`, None before the first. `memory` returns the MiB that it uses, and `limit` is its limit, 0
    without one."""

    role: Role
    version: int
    pid: int
    step: int
    stepped_at: int | None
    memory: Callable[[], int]
    limit: int


class PaceReport:
    """To be used in the thread of a running loop. `tasks` returns those that run, and `wake` has a report built.
    `failed` is called with an error of a reading, which ends no other reading. `clock` gives nanoseconds as
    `time.monotonic_ns`; `processors` and `memory` (MiB) are what this node may use."""

    def __init__(
        self,
        tasks: Callable[[], Iterable[SeenTask]],
        wake: Callable[[], None],
        failed: Callable[[Exception], None],
        clock: Callable[[], int] = time.monotonic_ns,
        processors: Callable[[], float] = usable_processors,
        memory: Callable[[], int] = lambda: usable_memory() >> 20,
        cpu: Callable[[int], float] = lambda pid: cpu_seconds(tree.below(pid)),
    ) -> None:
        self._tasks = tasks
        self._wake = wake
        self._clock = clock
        self._processors = processors
        self._memory = memory
        self._cpu = cpu
        self._order = NodeOrder(version=0)
        self._interval = 0.0
        self._failed = failed
        self._background = Background(failed)
        self._first: tuple[int, int] = (0, 0)
        self._used: tuple[int, dict[int, float]] = (0, {})
        self._pace: Pace | None = None
        self._load: ServerLoad | None = None

    def follow(self, order: NodeOrder, shutting_down: bool) -> None:
        """Take the latest order. Idempotent."""
        self._order = order
        wanted = 0.0 if shutting_down else order.report_interval
        if wanted != self._interval:
            self._interval = wanted
            self.close()
            if wanted:
                self._background.start(every(wanted, self._read, self._failed, first=wanted))

    def add_to(self, part: NodeTasks) -> NodeTasks:
        """The part of a report with what was read last of this version."""
        pace, load = (one if one is not None and one.version == self._order.version else None for one in self._last)
        return part if pace is None and load is None else msgspec.structs.replace(part, pace=pace, load=load)

    def close(self) -> None:
        """Read no more. Idempotent."""
        self._background.cancel()

    @property
    def _last(self) -> tuple[Pace | None, ServerLoad | None]:
        return self._pace, self._load

    def _read(self) -> None:
        before = self._last
        here = [task for task in self._tasks() if task.version == self._order.version]
        self._pace = self._read_pace(here)
        self._load = self._read_load([task for task in here if task.role is Role.PS])
        if self._last != before:
            self._wake()

    def _read_pace(self, here: Sequence[SeenTask]) -> Pace | None:
        if not any(task.role is Role.CHIEF for task in here):
            return None
        seen = [
            (task.step, task.stepped_at)
            for task in here
            if task.stepped_at is not None and not ROLES[task.role].outlives_versions
        ]
        if not seen:
            return None
        step, at = max(seen)
        version, first = self._first
        if version != self._order.version:
            first = at
            self._first = self._order.version, at
        seconds, age = max(0, at - first) / 1e9, max(0, self._clock() - at) / 1e9
        return Pace(self._order.version, max(0, step), round(seconds, 3), round(age, 3))

    def _read_load(self, servers: Sequence[SeenTask]) -> ServerLoad | None:
        now, used = self._clock(), {task.pid: self._cpu(task.pid) for task in servers}
        (then, before), self._used = self._used, (now, used)
        if not servers or set(before) != set(used) or now <= then:
            return None
        cpu = sum(max(0.0, used[pid] - before[pid]) for pid in used) / ((now - then) / 1e9)
        sizes = [(task.memory(), task.limit) for task in servers]
        shares = [size / limit for size, limit in sizes if limit]
        shares.append(sum(size for size, _ in sizes) / self._memory())
        return ServerLoad(self._order.version, _percent(cpu / self._processors()), _percent(max(shares)))


def _percent(share: float) -> int:
    return min(round(100 * share), MAX_PERCENT)
