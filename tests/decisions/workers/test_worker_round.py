"""When a round reports a failure, and of which worker: scripted workers and a scripted relay, in virtual time."""

from __future__ import annotations

import asyncio
import errno
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from support.virtual_loop import run_virtually

from dlrover_run.coordination.records.round import PlannedChange
from dlrover_run.events.records import Event, Events, WorkerExited, WorkerFailed, WorkerProgress, WorkerReady
from dlrover_run.failures import causes
from dlrover_run.observe.page import Phase, Progress, StepSource
from dlrover_run.workers.cause_collector import LOST_PEER_DELAY
from dlrover_run.workers.round import WorkerRound

TRACE = "Traceback (most recent call last):\n  File 'train.py', line 8, in <module>\n"
OWN = TRACE + "ValueError: bad label\n"
LOST = TRACE + "RuntimeError: Connection closed by peer\n"


@dataclass
class Worker:
    """A worker that was started; `stderr` is its error output."""

    rank: int
    stderr: str = ""
    code: int | None = None
    stopped_with: signal.Signals | None = None
    stopped_at: float | None = None
    ended_at: float = 0.0
    peak_memory: int = 0
    pid: int = 0
    forwarded: frozenset[int] = frozenset()
    live: bool = True

    @property
    def spec(self) -> Any:
        return SimpleNamespace(name=f"rank {self.rank}", rank=self.rank, local_rank=self.rank)


@dataclass
class Bed(Events):
    """A round of two workers, and its events."""

    workers: list[Worker] = field(default_factory=lambda: [Worker(0), Worker(1)])
    reported: list[tuple[float, int]] = field(default_factory=list)
    emitted: list[Event] = field(default_factory=list)
    pages: dict[int, Progress] = field(default_factory=dict)
    is_closed: bool = False
    unread: list[int] = field(default_factory=list)
    news: int = 0

    def __post_init__(self) -> None:
        stream = SimpleNamespace(path=None)
        placed = [SimpleNamespace(stdout=stream, stderr=stream, error_file=None) for _ in self.workers]
        specs: Any = SimpleNamespace(
            ranks=SimpleNamespace(round=1, nodes=1, first_rank=0, workers=len(self.workers)),
            workers=[],
            streams=SimpleNamespace(ranks=placed),
            startup_probe=SimpleNamespace(has_trained=lambda: True, marks=self, close=lambda: None),
            progress=SimpleNamespace(read=self.pages.get, close=lambda: None),
            results=None,
            stacks=None,
        )
        with mock.patch("dlrover_run.workers.round.ProcessGroup", return_value=self):
            self.round = WorkerRound(specs, None, self, lambda worker: None, self._note, self)  # type: ignore[arg-type]

    def announce(self, change: bool) -> None:
        """Nothing waits for it here."""

    def read(self) -> None:
        if self.is_closed:
            raise OSError(errno.EBADF, "Bad file descriptor")
        while self.unread:
            self.save(self.unread.pop(0))

    def save(self, step: int) -> None:
        self.round.checkpoints._note(step)

    # What the round uses of its process group and of the relay.

    @property
    def running(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.code is None]

    @property
    def ended(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.code is not None]

    async def tails(self, keys: Collection[str]) -> dict[str, str]:
        await asyncio.sleep(0)
        return {str(worker.rank): worker.stderr for worker in self.workers if str(worker.rank) in keys}

    async def end_round(self, keys: Collection[str], timeout: float | None) -> dict[str, str]:
        return await self.tails(keys)

    def emit(self, event: Event) -> None:
        self.emitted.append(event)

    # What happens.

    def end(self, rank: int, code: int, stderr: str = "") -> None:
        worker = self.workers[rank]
        worker.code, worker.ended_at = code, asyncio.get_running_loop().time()
        worker.stderr += stderr
        self.round._note_end(worker)  # type: ignore[arg-type]

    def stop(self, rank: int) -> None:
        self.workers[rank].stopped_with = signal.SIGTERM
        self.workers[rank].stopped_at = asyncio.get_running_loop().time()

    def _note(self) -> None:
        self.news += 1
        if self.round.failure is not None:
            self.reported.append((asyncio.get_running_loop().time(), self.round.failure.rank))

    async def root(self) -> int | None:
        """The rank that the report at the end names."""
        await self.round.collect_exit_info(None)
        root = causes.root_cause(self.round.ends)
        return root.rank if root is not None else None


def test_only_a_checkpoint_after_its_announcement_counts_for_a_planned_change() -> None:
    async def run() -> None:
        bed, change = Bed(), PlannedChange(epoch=7, since=30.0)
        bed.unread.append(10)
        bed.round.checkpoints.follow(change)
        assert (bed.round.checkpoints.saves, bed.round.checkpoints.saved_for) == (True, None)
        bed.save(20)
        assert bed.round.checkpoints.saved_for == change

    run_virtually(run())


def test_of_frequent_checkpoints_those_are_news_that_a_decision_depends_on() -> None:
    async def run() -> None:
        bed = Bed()
        for step in range(10):
            bed.save(step)
        bed.round.checkpoints.follow(PlannedChange(epoch=7, since=30.0))
        for step in range(10):
            bed.save(step)
        bed.round.checkpoints.follow(None)
        bed.save(20)
        assert bed.news == 2
        assert len(bed.emitted) == 21

    run_virtually(run())


def test_the_loss_of_a_peer_waits_for_the_failure_that_explains_it() -> None:
    async def run() -> None:
        bed = Bed()
        bed.end(0, 1, LOST)
        await asyncio.sleep(LOST_PEER_DELAY / 2)
        assert bed.round.failure is None
        bed.end(1, 1, OWN)
        await asyncio.sleep(LOST_PEER_DELAY)
        assert bed.reported == [(LOST_PEER_DELAY / 2, 1)]
        assert await bed.root() == 1

    run_virtually(run())


def test_the_end_of_a_stuck_worker_after_its_round_was_closed_changes_nothing() -> None:
    """It was a traceback: the round reads its pipe and its pages at the end of a worker, and both were closed."""

    async def run() -> None:
        bed = Bed()
        bed.stop(1)
        bed.end(0, 0)
        bed.round.close()
        before = len(bed.emitted)
        bed.is_closed = True
        bed.end(1, -9)
        assert len(bed.emitted) == before

    run_virtually(run())


def test_the_event_log_has_each_exit_and_the_root_cause() -> None:
    async def run() -> None:
        bed = Bed()
        bed.end(0, 1, LOST)
        await asyncio.sleep(LOST_PEER_DELAY / 2)
        assert [type(event) for event in bed.emitted] == [WorkerExited]
        now = time.monotonic_ns()
        bed.pages[1] = Progress(1, 8, 0.5, now, StepSource.REPORT, Phase.TRAINING, now, 1)
        bed.end(1, 1, OWN)
        await asyncio.sleep(LOST_PEER_DELAY)
        _, ready, figures, exited, failed = bed.emitted
        assert isinstance(ready, WorkerReady)
        assert isinstance(figures, WorkerProgress)
        assert (ready.rank, ready.stage, figures.samples) == (1, "step", 8)
        assert isinstance(exited, WorkerExited)
        assert isinstance(failed, WorkerFailed)
        assert (exited.rank, exited.code, exited.stopped_with) == (1, 1, "")
        assert (failed.rank, failed.cause) == (1, causes.Cause.EXCEPTION)
        assert "bad label" in failed.what

    run_virtually(run())


def test_a_worker_that_failed_by_itself_is_reported_at_once() -> None:
    async def run() -> None:
        bed = Bed()
        bed.end(1, 1, OWN)
        await asyncio.sleep(0.001)
        assert [rank for _, rank in bed.reported] == [1]
        bed.end(0, 1, LOST)
        await asyncio.sleep(LOST_PEER_DELAY)
        assert await bed.root() == 1

    run_virtually(run())


def test_the_loss_of_a_peer_is_reported_at_once_where_no_other_worker_runs() -> None:
    async def run() -> None:
        bed = Bed()
        bed.end(1, 0)
        bed.end(0, 1, LOST)
        await asyncio.sleep(0.001)
        assert [rank for _, rank in bed.reported] == [0]

    run_virtually(run())


@pytest.mark.parametrize(
    ("stderr", "root"),
    [
        pytest.param(OWN, 1, id="it has raised an error and still exits"),
        pytest.param(LOST, 0, id="it has lost the peer too"),
        pytest.param(OWN + "step\n" * 20, 0, id="it has recovered from an error"),
        pytest.param("", 0, id="it has written nothing"),
    ],
)
def test_a_worker_that_is_stopped_is_the_cause_only_if_it_had_raised_its_own_error(stderr: str, root: int) -> None:
    async def run() -> None:
        bed = Bed()
        bed.workers[1].stderr = stderr
        bed.end(0, 1, LOST)
        await asyncio.sleep(LOST_PEER_DELAY + 0.001)
        assert bed.reported == [(LOST_PEER_DELAY, 0)]
        bed.stop(1)
        # A worker may raise because of the signal.
        bed.end(1, -signal.SIGTERM, "" if stderr else OWN)
        assert await bed.root() == root

    run_virtually(run())
