"""Tasks of asyncio that end together, for Pythons that have no task groups yet."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Nursery:
    """Tasks that are started one by one. The first that fails is heard by whoever waits; `close` ends all of them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin a task. It may be cancelled by itself, which is no failure."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    async def until_done(self, task: asyncio.Task[None]) -> None:
        """Wait for the end of one of the tasks. Raises what any of them raises before that."""
        await asyncio.wait([task, self._failed], return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            self._failed.result()

    async def close(self) -> None:
        """End all tasks and wait until they have ended."""
        if not self._failed.cancel():
            # It may be that nobody has waited for it.
            self._failed.exception()
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)


async def wait_until(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for an event for at most that long, None for ever; whether it has come.

    Unlike `asyncio.wait_for` before Python 3.12 this never loses a cancellation that comes together with the event.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([waiting], timeout=None if seconds is None else max(0.0, seconds))
    finally:
        waiting.cancel()
    return event.is_set()
