"""What becomes of the work in the background of a loop, and of its errors."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

import pytest
from support.virtual_loop import VirtualLoop, run_virtually

from dlrover_run.background import LONG_PAUSE, Background, Group, TimeLimit, beside, every, wait_for_event


async def _wait_for_ever() -> None:
    await asyncio.get_running_loop().create_future()


async def _fail(error: Exception) -> None:
    raise error


def test_a_group_raises_the_error_because_of_which_the_others_end() -> None:
    async def fail_when_cancelled() -> None:
        try:
            await _wait_for_ever()
        finally:
            raise OSError("a consequence")

    async def whole() -> None:
        async with Group() as group:
            group.create_task(fail_when_cancelled())
            await asyncio.sleep(0)
            group.create_task(_fail(ValueError("the cause")))

    with pytest.raises(ValueError, match="the cause"):
        asyncio.run(whole())


def test_a_group_in_a_group_raises_its_own_error() -> None:
    async def inner() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(_fail(ValueError("the cause")))

    async def whole() -> None:
        async with Group() as group:
            group.create_task(inner())

    with pytest.raises(ValueError, match="the cause"):
        asyncio.run(whole())


def test_an_error_in_the_background_is_told_at_once_and_ends_nothing_else() -> None:
    errors: list[Exception] = []

    async def whole() -> None:
        background = Background(errors.append)
        goes_on = background.start(_wait_for_ever())
        background.start(_fail(ValueError("broken")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [str(error) for error in errors] == ["broken"]
        assert not goes_on.done()
        await background.close()
        assert goes_on.cancelled()

    asyncio.run(whole())
    assert len(errors) == 1


def test_an_error_while_the_background_is_closed_is_told_too() -> None:
    errors: list[Exception] = []

    async def fail_when_cancelled() -> None:
        try:
            await _wait_for_ever()
        finally:
            raise OSError("cannot be ended")

    async def whole() -> None:
        background = Background(errors.append)
        background.start(fail_when_cancelled())
        await asyncio.sleep(0)
        await background.close()

    asyncio.run(whole())
    assert [str(error) for error in errors] == ["cannot be ended"]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (lambda task: asyncio.wait([task]), "of the work"),
        (lambda task: _fail(ValueError("of the block")), "of the block"),
    ],
)
def test_the_error_of_work_beside_a_block_is_raised_unless_the_block_fails(
    block: Callable[[asyncio.Future[None]], Awaitable[object]], expected: str
) -> None:
    async def whole() -> None:
        async with beside(_fail(ValueError("of the work"))) as task:
            await block(task)

    with pytest.raises(ValueError, match=expected):
        asyncio.run(whole())


def test_work_beside_a_block_has_ended_after_it() -> None:
    async def whole() -> bool:
        async with beside(_wait_for_ever()) as task:
            await asyncio.sleep(0)
        return task.cancelled()

    assert asyncio.run(whole())


def test_a_block_whose_loop_has_gone_is_left_without_a_wait() -> None:
    async def whole() -> None:
        async with beside(_wait_for_ever()):
            await asyncio.Event().wait()

    loop, block = asyncio.new_event_loop(), whole()
    try:
        work = loop.create_task(block)
        loop.run_until_complete(asyncio.sleep(0))
        # As the end of the interpreter does with what is left; it may await nothing.
        block.close()
        assert not work.done()
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


class Calls:
    """A function that is called every second, whose calls with these numbers fail."""

    def __init__(self, *failing: int) -> None:
        self.failing = failing
        self.at: list[float] = []
        self.errors: list[str] = []

    def call(self) -> None:
        self.at.append(asyncio.get_running_loop().time())
        if (number := len(self.at)) in self.failing:
            raise ValueError(f"call {number}")

    async def call_slowly(self) -> None:
        await asyncio.sleep(0.5)
        self.call()

    def note(self, error: Exception) -> None:
        self.errors.append(str(error))

    async def run(self, until: float, function: Callable[[], object], first: float = 0.0) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until):
                await every(1.0, function, self.note, first=first)


def test_a_function_is_called_again_after_that_many_seconds_until_this_is_cancelled() -> None:
    calls = Calls()
    run_virtually(calls.run(3.5, calls.call))
    assert calls.at == [0, 1, 2, 3]


def test_the_first_call_may_be_later() -> None:
    calls = Calls()
    run_virtually(calls.run(3.5, calls.call, first=2.0))
    assert calls.at == [2, 3]


def test_a_call_begins_only_after_the_one_before_has_ended() -> None:
    calls = Calls(1)
    run_virtually(calls.run(4.0, calls.call_slowly))
    assert calls.at == [0.5, 2.0, 3.5]
    assert calls.errors == ["call 1"]


def test_an_error_is_reported_once_until_a_call_succeeds_and_ends_nothing() -> None:
    calls = Calls(1, 2, 4, 5)
    run_virtually(calls.run(6.5, calls.call))
    assert calls.at == [0, 1, 2, 3, 4, 5, 6]
    assert calls.errors == ["call 1", "call 4"]


def test_an_error_in_the_report_of_an_error_ends_it() -> None:
    calls = Calls(1)
    with pytest.raises(ValueError, match="call 1"):
        run_virtually(every(1.0, calls.call, _raise))


def _raise(error: Exception) -> None:
    raise error


LIMIT = 10.0


def _waits(
    pause: float, turns: int = 1, answers: bool = True, ends: Callable[[TimeLimit], None] = lambda limit: None
) -> tuple[str, float]:
    """What a block with a limit of ten seconds gets, and when: at the fifth second its process is stopped for `pause`,
    and an answer comes meanwhile. It is read when the process goes on, and so many tasks pass it on to the block."""

    async def pass_on(found: Awaitable[str]) -> str:
        return await found

    async def whole() -> tuple[str, float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            received: asyncio.Future[str] = loop.create_future()
            loop.add_reader(ours, lambda: received.set_result(ours.recv(100).decode()))
            answer: Awaitable[str] = received
            for _ in range(turns):
                answer = asyncio.ensure_future(pass_on(answer))

            def stop() -> None:
                loop.pause(pause)
                if answers:
                    theirs.send(b"here")

            loop.call_at(5, stop)
            try:
                async with TimeLimit(LIMIT) as limit:
                    ends(limit)
                    found = await answer
            except TimeoutError:
                found = "too late"
            finally:
                loop.remove_reader(ours)
            return found, loop.time()

    return run_virtually(whole())


@pytest.mark.parametrize("turns", [0, 1, 5])
def test_an_answer_that_came_while_this_process_was_stopped_is_no_time_out(turns: int) -> None:
    assert _waits(60, turns) == ("here", 65)


def test_an_answer_in_the_turn_of_the_loop_in_which_the_time_is_over_counts() -> None:
    assert _waits(5 + LONG_PAUSE / 2, turns=0) == ("here", 10 + LONG_PAUSE / 2)


def test_after_a_pause_the_whole_time_counts_again() -> None:
    assert _waits(60, answers=False) == ("too late", 65 + LIMIT)
    assert _waits(1, answers=False) == ("too late", 10), "the pause was over before the limit"


@pytest.mark.parametrize(("seconds", "end"), [(2, 2), (30, 10), (0, 0)])
def test_a_limit_is_shortened_and_never_prolonged(seconds: float, end: float) -> None:
    assert _waits(0, answers=False, ends=lambda limit: limit.shorten(seconds)) == ("too late", end)


def test_a_limit_that_is_over_is_not_shortened_any_more() -> None:
    async def whole() -> bool:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with TimeLimit(1) as limit:
                loop.call_at(1, lambda: loop.call_soon(limit.shorten, 0))
                await _wait_for_ever()
        limit.shorten(0)
        await asyncio.sleep(5)
        return True

    assert run_virtually(whole())


def test_none_is_no_limit_and_a_negative_one_is_over_at_once() -> None:
    async def wait(seconds: float | None) -> float:
        with contextlib.suppress(TimeoutError):
            async with TimeLimit(seconds):
                await asyncio.sleep(1000)
        return asyncio.get_running_loop().time()

    assert run_virtually(wait(None)) == 1000
    assert run_virtually(wait(-3)) == 0


def test_who_cancels_a_block_with_a_limit_gets_no_time_out() -> None:
    async def whole() -> None:
        async with TimeLimit(LIMIT):
            await _wait_for_ever()

    async def cancel() -> None:
        task = asyncio.ensure_future(whole())
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    run_virtually(cancel())


def test_a_pause_does_not_prolong_the_wait_for_a_time_of_our_own() -> None:
    async def whole() -> tuple[bool, float]:
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        assert isinstance(loop, VirtualLoop)
        loop.call_at(5, loop.pause, 60)
        return await wait_for_event(event, 10), loop.time()

    assert run_virtually(whole()) == (False, 65)
