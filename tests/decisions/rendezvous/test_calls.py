"""Calls over a channel: a caller that gives up receives its own error, and the later result of the call is dropped."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

import pytest

from dlrover_run.transport.grpc_errors import CallCancelled, CallTimeout, wait_for_call


def complaints(conversation: Callable[[], Awaitable[None]]) -> list[str]:
    """Return what asyncio would have printed during these calls."""
    errors: list[str] = []

    async def whole() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["message"]))
        await conversation()
        await asyncio.sleep(0)
        gc.collect()

    asyncio.run(whole())
    return errors


def test_a_failure_in_the_moment_of_a_cancellation_is_not_printed() -> None:
    async def conversation() -> None:
        work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(wait_for_call(work))
        await asyncio.sleep(0)
        work.set_exception(ValueError("the member has died"))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    assert complaints(conversation) == []


@pytest.mark.parametrize("timeout", [None, 0])
def test_a_failure_that_giving_up_brings_about_is_not_printed(timeout: float | None) -> None:
    async def fail_when_given_up() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            raise ValueError("the call has ended") from None

    async def conversation() -> None:
        waiting = asyncio.ensure_future(wait_for_call(fail_when_given_up(), timeout))
        # Now the work has begun.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if timeout is None:
            waiting.cancel()
        with pytest.raises(asyncio.CancelledError if timeout is None else CallTimeout):
            await waiting

    assert complaints(conversation) == []


def test_a_call_that_was_broken_off_does_not_cancel_its_caller() -> None:
    async def conversation() -> None:
        work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(wait_for_call(work))
        await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(CallCancelled, match="the connection was closed on this side"):
            await waiting

    assert complaints(conversation) == []


def test_what_the_work_raises_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("the member has died")

    async def conversation() -> None:
        with pytest.raises(ValueError, match="has died"):
            await wait_for_call(fail())

    assert complaints(conversation) == []
