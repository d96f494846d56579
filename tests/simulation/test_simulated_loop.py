"""The event loop that runs asyncio's own tasks in virtual time, in processes that are stopped, resumed and killed."""

from __future__ import annotations

import asyncio

import pytest

from dlrover_run.background import TimeLimit
from simulation.bed import Bed
from simulation.timeline import Broken


def test_tasks_events_and_time_outs_run_in_virtual_time() -> None:
    bed = Bed()

    async def wait() -> list[str]:
        event = asyncio.Event()
        asyncio.get_running_loop().call_later(50, event.set)
        found = []
        try:
            await asyncio.wait_for(event.wait(), 20)
        except TimeoutError:
            found.append("too late")
        await asyncio.wait([asyncio.ensure_future(event.wait())])
        queue: asyncio.Queue[str] = asyncio.Queue()
        asyncio.get_running_loop().call_soon(queue.put_nowait, "put")
        found.append(await queue.get())
        return found

    assert bed.do(wait()) == ["too late", "put"]
    assert 50 <= bed.timeline.now < 51


def test_nothing_runs_in_a_stopped_process_and_its_clock_goes_on() -> None:
    bed = Bed()
    done: list[float] = []

    async def sleep() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(10)
        done.append(loop.time() - began)

    bed.start(sleep())
    bed.wait(1)
    bed.process.stop()
    bed.wait(60)
    assert not done
    bed.process.resume()
    bed.wait(1)
    assert done[0] == pytest.approx(61, abs=0.1)


def test_a_process_that_goes_on_receives_what_came_before_it_sees_what_is_late() -> None:
    bed = Bed()

    async def ask() -> str:
        try:
            async with TimeLimit(3):
                await bed.client.grant(5)
        except TimeoutError:
            return "late"
        return "heard"

    bed.do(bed.client.grant(5))
    task = bed.start(ask())
    bed.timeline.run_until(bed.timeline.now + 0.0001, lambda: False)
    bed.process.stop()
    bed.wait(60)
    bed.process.resume()
    bed.wait(1)
    assert task.result() == "heard"


def test_nothing_ever_runs_again_in_a_process_that_was_killed(recwarn: pytest.WarningsRecorder) -> None:
    bed = Bed()
    steps: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(5)
            steps.append("slept")
        finally:
            await asyncio.sleep(5)
            steps.append("tidied up")

    bed.start(work())
    bed.wait(1)
    bed.process.end()
    bed.wait(60)
    bed.process.dispose()
    assert not steps
    assert not recwarn.list


def test_a_defect_in_a_task_ends_the_run() -> None:
    bed = Bed()

    async def stumble() -> None:
        await asyncio.sleep(1)
        raise KeyError("a defect")

    bed.start(stumble())
    with pytest.raises(Broken, match="a defect"):
        bed.wait()


def test_a_broken_invariant_ends_the_run_though_the_task_hides_it() -> None:
    bed = Bed()

    async def hide() -> None:
        async def break_an_invariant() -> None:
            raise Broken("an invariant")

        await asyncio.gather(break_an_invariant(), return_exceptions=True)

    bed.start(hide())
    with pytest.raises(Broken, match="an invariant"):
        bed.wait()
