"""When the agent reads the progress of its tasks: only for a listener, and only while a task runs. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from virtual_loop import run_virtually

from dlrover_run.features.observe.page import Phase, Progress, StepSource
from dlrover_run.features.observe.progress_sampler import SAMPLE_INTERVAL, Activities, Period, ProgressSampler

STEP = 0.25


@dataclass
class Task:
    """A task that makes a step every 0.25 s of the loop's time, until its `last`."""

    source: StepSource = StepSource.REPORT
    began: float = 0.0
    last: float = float("inf")
    reads: list[float] = field(default_factory=list)

    def read(self) -> Mapping[str, Progress]:
        now = asyncio.get_running_loop().time()
        self.reads.append(now)
        steps = int((min(now, self.last) - self.began) / STEP)
        at = int((self.began + steps * STEP) * 1e9)
        return {"rank 0": Progress(steps, 0, 0.0, at, self.source, Phase.TRAINING)}


def test_without_a_listener_nothing_is_read() -> None:
    async def run() -> list[float]:
        task = Task()
        sampler = ProgressSampler(task.read)
        sampler.follow(1, True)
        await asyncio.sleep(100)
        return task.reads

    assert run_virtually(run()) == []


def test_a_listener_gets_samples_while_a_task_runs_and_until_the_end() -> None:
    async def run() -> list[list[float]]:
        task = Task()
        samples: list[None] = []
        sampler = ProgressSampler(task.read, lambda: samples.append(None))
        reads = []
        for running in (False, True, False, True):
            sampler.follow(1, running)
            await asyncio.sleep(3.5 * SAMPLE_INTERVAL)
            reads.append(list(task.reads))
            task.reads.clear()
        sampler.close()
        await asyncio.sleep(100)
        assert len(samples) == 6
        return [*reads, task.reads]

    assert [len(each) for each in run_virtually(run())] == [0, 3, 0, 3, 0]


def test_the_period_is_that_of_the_steps_and_not_of_the_samples() -> None:
    async def run() -> list[Activities]:
        sampler = ProgressSampler(Task().read)
        sampler.follow(1, True)
        seen: list[Activities] = []
        for _ in range(11):
            await asyncio.sleep(0.9)
            seen.append(sampler.sample())
        sampler.follow(2, True)
        await asyncio.sleep(0.9)
        return [*seen, sampler.sample()]

    seen = run_virtually(run())
    assert seen[0]["rank 0"].period is None
    assert seen[-2]["rank 0"].period == Period(STEP, 0.0, STEP)
    assert seen[-1]["rank 0"].period is None


def test_another_source_has_another_rhythm() -> None:
    async def run() -> tuple[Activities, Activities]:
        task = Task(StepSource.LOG)
        sampler = ProgressSampler(task.read)
        sampler.follow(1, True)
        for _ in range(9):
            await asyncio.sleep(1)
            before = sampler.sample()
        task.source = StepSource.OPTIMIZER
        return before, sampler.sample()

    before, after = run_virtually(run())
    assert before["rank 0"].period == Period(STEP, 0.0, STEP)
    assert after["rank 0"].period is None
