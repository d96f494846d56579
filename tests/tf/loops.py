"""Tests that run in an event loop."""

from __future__ import annotations

import asyncio
import functools
import gc
from collections.abc import Awaitable, Callable
from typing import Any


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test in its own event loop; an error that the loop only reports fails the test."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        errors: list[Any] = []

        async def checked() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
            await test(*args, **fixtures)
            gc.collect()

        asyncio.run(checked())
        assert not errors, errors

    return run
