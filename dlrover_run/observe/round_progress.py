"""What the workers of one round have done: read from their pages, and written to the event log, which has when each
made its first step, and its figures."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from dlrover_run.coordination.records.round import RankAssignment
from dlrover_run.events.records import Events, WorkerProgress, WorkerReady
from dlrover_run.observe.page import Progress
from dlrover_run.observe.tick import Activities
from dlrover_run.processes.process import ProcessGroup
from dlrover_run.workers.specs import Worker, WorkerSpec, WorkerSpecs

FIGURES_INTERVAL = 60.0
"""Seconds between two events with the figures of a worker."""


class RoundProgress:
    """Reads the pages of the workers of a round, which began at that time of the monotonic clock. A read costs some
    microseconds a worker; one that has reported nothing is left out."""

    def __init__(self, specs: WorkerSpecs, group: ProcessGroup[WorkerSpec], events: Events, began: float) -> None:
        self._specs = specs
        self._group = group
        self._events = ProgressEvents(specs.ranks, events, began)

    def carry_on(self, kept: Collection[int]) -> None:
        """Note that the workers with these local ranks run since an earlier round."""
        done = ((worker.local_rank, done) for worker, done in self._read(self._specs.workers))
        self._events.carry_on({rank: progress for rank, progress in done if rank in kept and progress is not None})

    def by_name(self) -> dict[str, Progress]:
        """All that the workers have done, by name."""
        return {worker.name: done for worker, done in self._read(self._specs.workers) if done is not None}

    def script_ended(self, worker: Worker) -> float | None:
        """When the script of a worker was over, in seconds of the monotonic clock; None if that is not known."""
        done = self._specs.progress.read(worker.spec.local_rank)
        return round(max(done.ended, done.at) / 1e9, 6) if done is not None and done.ended else None

    def log(self, sample: Activities) -> None:
        """Write to the event log what the workers that run have done by this sample."""
        running = [worker.spec for worker in self._group.running]
        done = {
            spec.local_rank: None if (known := sample.get(spec.name)) is None else known.progress for spec in running
        }
        self._events.follow(done, time.monotonic())

    def log_last(self, workers: Sequence[Worker] | None = None) -> None:
        """Write to the event log what these workers, or all that run, have done in the end."""
        specs = [worker.spec for worker in (self._group.running if workers is None else workers)]
        done = {worker.local_rank: progress for worker, progress in self._read(specs)}
        self._events.follow(done, time.monotonic(), last=True)

    def _read(self, workers: Iterable[WorkerSpec]) -> Iterator[tuple[WorkerSpec, Progress | None]]:
        return ((worker, self._specs.progress.read(worker.local_rank)) for worker in workers)


class ProgressEvents:
    """The workers of one round. Times are in seconds of the monotonic clock; `began` is when they were started."""

    def __init__(self, ranks: RankAssignment, events: Events, began: float) -> None:
        self._ranks = ranks
        self._events = events
        self._without_step = dict.fromkeys(range(ranks.workers), began)
        self._earlier: dict[int, int] = {}
        self._figures: dict[int, float] = {}

    def carry_on(self, before: Mapping[int, Progress]) -> None:
        """Take what workers had done before this round, by local rank; they run since an earlier one."""
        self._earlier = {local_rank: done.steps for local_rank, done in before.items()}

    def follow(self, progress: Mapping[int, Progress | None], now: float, last: bool = False) -> None:
        """Take what workers have done until now, by local rank; None for one that has reported nothing. With `last` it
        is the last time for them."""
        for local_rank, done in progress.items():
            if done is None or done.steps <= self._earlier.get(local_rank, 0):
                self._without_step[local_rank] = now
                continue
            if local_rank in self._without_step:
                self._date_first_step(local_rank, done, now, last)
            if last or now - self._figures.get(local_rank, -FIGURES_INTERVAL) >= FIGURES_INTERVAL:
                self._figures[local_rank] = now
                self._events.emit(
                    WorkerProgress(
                        round=self._ranks.round,
                        rank=self._ranks.first_rank + local_rank,
                        local_rank=local_rank,
                        steps=done.steps,
                        samples=done.samples,
                        waited=round(done.waited, 3),
                    )
                )

    def _date_first_step(self, local_rank: int, done: Progress, now: float, last: bool) -> None:
        """Emit when the first step was done, as soon as that is known."""
        if earlier := self._earlier.get(local_rank):
            # The page has no time of the first step of this round.
            steps = done.steps - earlier
            done, last = done._replace(steps=steps, first=done.at, first_steps=steps), True
        first = first_step(self._without_step[local_rank], done, last)
        if first is not None:
            del self._without_step[local_rank]
            self._events.emit(
                WorkerReady(
                    round=self._ranks.round,
                    rank=self._ranks.first_rank + local_rank,
                    local_rank=local_rank,
                    stage="step",
                    since=round(min(first, now), 6),
                )
            )


def first_step(without: float, done: Progress, certain: bool) -> float | None:
    """When the first of the steps was done, in seconds. A source that counts several steps at a time, such as a log
    with a line every hundred steps, has noted the last of its first ones: the steps after them show how long one takes.
    Without such steps None, or, if it has to be `certain`, as if all of the first ones took the same time since
    `without`, when there was none."""
    first, before = done.first / 1e9, done.first_steps - 1
    if not before:
        return first
    if done.steps > done.first_steps:
        period = (done.at - done.first) / 1e9 / (done.steps - done.first_steps)
        return min(first, max(without, first - before * period))
    return without + max(0.0, first - without) / done.first_steps if certain else None
