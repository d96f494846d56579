"""Tasks end together: the first failure is heard, nothing is left running, and no cancellation gets lost."""

from __future__ import annotations

import asyncio

import pytest

from dlrover_run.nursery import Nursery, wait_until


async def _for_ever() -> None:
    await asyncio.Event().wait()


async def _fail() -> None:
    raise LookupError("gone")


def test_whoever_waits_hears_the_failure_of_a_task_that_was_started_later() -> None:
    async def scene() -> None:
        nursery = Nursery()
        main = nursery.start(_for_ever())
        waiting = asyncio.ensure_future(nursery.until_done(main))
        await asyncio.sleep(0)
        nursery.start(_fail())
        with pytest.raises(LookupError):
            await waiting
        await nursery.close()
        assert main.cancelled()

    asyncio.run(scene())


def test_a_task_that_is_cancelled_by_itself_is_no_failure() -> None:
    async def scene() -> None:
        nursery = Nursery()
        event = asyncio.Event()
        main = nursery.start(_until(event))
        nursery.start(_for_ever()).cancel()
        await asyncio.sleep(0)
        event.set()
        await nursery.until_done(main)
        await nursery.close()

    asyncio.run(scene())


def test_a_failure_that_nobody_waited_for_makes_no_noise(capfd: pytest.CaptureFixture[str]) -> None:
    async def scene() -> None:
        nursery = Nursery()
        nursery.start(_fail())
        await asyncio.sleep(0)
        await nursery.close()

    asyncio.run(scene())
    assert capfd.readouterr().err == ""


def test_close_waits_for_a_task_that_takes_its_time_to_end() -> None:
    async def stubborn() -> None:
        try:
            await _for_ever()
        except asyncio.CancelledError:
            await _for_ever()

    async def scene() -> None:
        nursery = Nursery()
        task = nursery.start(stubborn())
        await asyncio.sleep(0)
        await asyncio.wait_for(_twice(nursery, task), 30)

    async def _twice(nursery: Nursery, task: asyncio.Task[None]) -> None:
        closing = asyncio.ensure_future(nursery.close())
        while not closing.done():
            await asyncio.sleep(0)
            task.cancel()
        assert task.cancelled()

    asyncio.run(scene())


@pytest.mark.parametrize("comes", [True, False])
def test_a_wait_tells_whether_the_event_came(comes: bool) -> None:
    async def scene() -> bool:
        event = asyncio.Event()
        if comes:
            asyncio.get_running_loop().call_soon(event.set)
        return await wait_until(event, None if comes else 0.001)

    assert asyncio.run(scene()) is comes


def test_a_cancellation_that_comes_with_the_event_is_not_lost() -> None:
    async def scene() -> None:
        event = asyncio.Event()
        task = asyncio.ensure_future(wait_until(event, 1000))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        event.set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scene())


async def _until(event: asyncio.Event) -> None:
    await event.wait()
