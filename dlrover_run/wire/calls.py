"""Waits for what is done over a channel of gRPC, and sees whether the channel or this node has broken it off."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

Answer = TypeVar("Answer")


class BrokenOff(Exception):
    """The channel was closed while something was done over it; the message is a clause."""

    def __init__(self) -> None:
        super().__init__("the connection was broken off")


class TooLate(Exception):
    """What was done took longer than it may; the message is a clause."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"it did not answer within {seconds:g} s")


async def settle(work: Awaitable[Answer], timeout: float | None = None) -> Answer:
    """What comes of work that uses a channel, within `timeout` seconds; None waits for as long as the channel lives.

    Raises BrokenOff, TooLate, and what the work raises.
    """
    # gRPC raises CancelledError for a call that was broken off, as if this task had been cancelled; so another task
    # does the work, and it is seen which of the two is meant.
    working = asyncio.ensure_future(work)
    working.add_done_callback(_take_notice)
    try:
        await asyncio.wait([working], timeout=timeout)
        if not working.done():
            assert timeout is not None, "without one the work is waited for"
            raise TooLate(timeout)
    finally:
        working.cancel()
    if working.cancelled():
        raise BrokenOff
    return working.result()


def _take_notice(working: asyncio.Future[Answer]) -> None:
    # Nobody asks any more how it ended when this node was cancelled or has waited too long, and asyncio prints a
    # traceback into the person's terminal for a failure that nobody has asked for.
    if not working.cancelled():
        working.exception()
