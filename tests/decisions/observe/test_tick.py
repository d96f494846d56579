"""When the agent takes samples of its tasks: for all that wants them together, and only while a task runs; and what an
error of one of them comes to. In virtual time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field

from support.virtual_loop import run_virtually

from dlrover_run.observe.page import Phase, Progress, StepSource
from dlrover_run.observe.tick import RETRY_INTERVAL, SAMPLE_INTERVAL, Activities, Tick

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


def no_error(name: str, error: Exception) -> None:
    raise AssertionError(f"{name} failed") from error


def test_without_a_consumer_nothing_is_read() -> None:
    async def run() -> list[float]:
        task = Task()
        tick = Tick(task.read, no_error)
        tick.follow(1, True)
        await asyncio.sleep(100)
        return task.reads

    assert run_virtually(run()) == []


def test_a_consumer_gets_samples_while_a_task_runs_and_until_the_end() -> None:
    async def run() -> list[list[float]]:
        task = Task()
        samples: list[Activities] = []

        def take(sample: Activities) -> float:
            samples.append(sample)
            return SAMPLE_INTERVAL

        tick = Tick(task.read, no_error)
        tick.add("it", take, first=SAMPLE_INTERVAL)
        reads = []
        for running in (False, True, False, True):
            tick.follow(1, running)
            await asyncio.sleep(3.5 * SAMPLE_INTERVAL)
            reads.append(list(task.reads))
            task.reads.clear()
        tick.close()
        await asyncio.sleep(100)
        assert len(samples) == 6
        return [*reads, task.reads]

    assert [len(each) for each in run_virtually(run())] == [0, 3, 0, 3, 0]


def test_consumers_with_different_wishes_share_samples() -> None:
    async def run() -> tuple[int, dict[str, int]]:
        task = Task()
        counts = {"slow": 0, "early": 0, "varied": 0}

        def taker(name: str, seconds: float) -> Callable[[Activities], float]:
            def take(sample: Activities) -> float:
                counts[name] += 1
                return seconds

            return take

        tick = Tick(task.read, no_error)
        tick.add("varied", taker("varied", 0.8))
        tick.add("early", taker("early", 1.0), early=0.3)
        tick.add("slow", taker("slow", 5.0), first=5.0, early=0.3)
        tick.follow(1, True)
        await asyncio.sleep(40)
        tick.close()
        return len(task.reads), counts

    reads, counts = run_virtually(run())
    assert reads == counts["varied"] == counts["early"] == 51
    assert counts["slow"] == 8


def test_an_error_of_a_consumer_is_said_once_and_ends_neither_it_nor_the_others() -> None:
    async def run() -> tuple[list[str], int, list[float]]:
        loop = asyncio.get_running_loop()
        failed: list[str] = []
        good: list[Activities] = []
        tries: list[float] = []

        def take(sample: Activities) -> float:
            good.append(sample)
            return SAMPLE_INTERVAL

        async def fail(sample: Activities) -> float:
            tries.append(loop.time())
            await asyncio.sleep(0.1)
            if len(tries) != 4:
                raise ValueError("no such rank")
            return SAMPLE_INTERVAL

        def fail_at_once(sample: Activities) -> float:
            raise ValueError("no such page")

        tick = Tick(Task().read, lambda name, error: failed.append(f"{name}: {error}"))
        tick.add("hangs", fail)
        tick.add("the use", fail_at_once)
        tick.add("the steps", take)
        tick.follow(1, True)
        await asyncio.sleep(4.5 * RETRY_INTERVAL)
        tick.close()
        return failed, len(good), tries

    failed, good, tries = run_virtually(run())
    assert failed == ["the use: no such page", "hangs: no such rank", "hangs: no such rank"]
    assert good == 46
    first, second, _, fourth, fifth, _ = tries
    assert second - first > RETRY_INTERVAL
    assert fifth - fourth < 2, "it has worked again"


def test_an_error_of_a_reading_is_one_of_each_consumer_that_wanted_it() -> None:
    async def run() -> tuple[list[str], int]:
        failed: list[str] = []
        taken: list[Activities] = []
        broken = [True]

        def read() -> Mapping[str, Progress]:
            if broken[0]:
                raise OSError("no page")
            return {}

        def take(sample: Activities) -> float:
            taken.append(sample)
            return SAMPLE_INTERVAL

        tick = Tick(read, lambda name, error: failed.append(name))
        tick.add("it", take)
        tick.follow(1, True)
        await asyncio.sleep(2.5 * RETRY_INTERVAL)
        broken[0] = False
        await asyncio.sleep(RETRY_INTERVAL)
        tick.close()
        return failed, len(taken)

    failed, taken = run_virtually(run())
    assert failed == ["it"]
    assert taken >= 5


def test_a_consumer_that_works_gets_no_sample_and_holds_up_no_other() -> None:
    async def run() -> tuple[int, int, bool]:
        busy: list[float] = []
        good: list[float] = []
        cancelled = []

        async def work(sample: Activities) -> float:
            busy.append(0)
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise
            return 1.0

        def take(sample: Activities) -> float:
            good.append(0)
            return 1.0

        tick = Tick(Task().read, no_error)
        consumer = tick.add("hangs", work)
        tick.add("the steps", take)
        tick.follow(1, True)
        await asyncio.sleep(10.5)
        consumer.close()
        await asyncio.sleep(10)
        tick.close()
        return len(busy), len(good), bool(cancelled)

    assert run_virtually(run()) == (1, 21, True)


def test_the_period_is_that_of_the_steps_and_not_of_the_samples() -> None:
    async def run() -> list[Activities]:
        tick = Tick(Task().read, no_error)
        tick.follow(1, True)
        seen: list[Activities] = []
        for _ in range(11):
            await asyncio.sleep(0.9)
            seen.append(tick.sample())
        tick.follow(2, True)
        await asyncio.sleep(0.9)
        return [*seen, tick.sample()]

    seen = run_virtually(run())
    assert seen[0]["rank 0"].period is None
    assert seen[-2]["rank 0"].period == STEP
    assert seen[-1]["rank 0"].period is None


def test_another_source_has_another_rhythm() -> None:
    async def run() -> tuple[Activities, Activities]:
        task = Task(StepSource.LOG)
        tick = Tick(task.read, no_error)
        tick.follow(1, True)
        for _ in range(9):
            await asyncio.sleep(1)
            before = tick.sample()
        task.source = StepSource.OPTIMIZER
        return before, tick.sample()

    before, after = run_virtually(run())
    assert before["rank 0"].period == STEP
    assert after["rank 0"].period is None


def test_a_consumer_that_is_closed_before_the_work_with_its_sample_begins_leaves_nothing_unawaited() -> None:
    async def run() -> list[bool]:
        task = Task()
        tick = Tick(task.read, no_error)

        async def work() -> float:
            raise AssertionError("it never begins")

        wishes = []

        def take(sample: Activities) -> Coroutine[object, object, float]:
            wishes.append(work())
            # When the work has been made a task, and before its first step.
            asyncio.get_running_loop().call_soon(consumer.close)
            return wishes[-1]

        consumer = tick.add("it", take)
        tick.follow(1, True)
        await asyncio.sleep(1)
        return [inspect.getcoroutinestate(wish) == inspect.CORO_CLOSED for wish in wishes]

    assert run_virtually(run()) == [True]
