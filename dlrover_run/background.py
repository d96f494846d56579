"""Work that goes on in the background of an event loop: what ends it, and who learns of its errors.

Each task of the product is started here or in a group, so no error ends unseen, and no task outlives its owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class Group(asyncio.TaskGroup):
    """A group whose first error ends the others, and is raised itself, not as one of several: the cause of the rest."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        except BaseExceptionGroup as failed:
            raise _first(failed) from None


class Background:
    """The tasks of one object. An error of one ends none of the others: `failed` is called with it at once.

    `cancel` or `close` ends them with the object.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin the work, in a running loop. The owner may wait for the task, or cancel it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def cancel(self) -> None:
        """Cancel all tasks; a caller that has to know when they have ended calls `close`."""
        for task in list(self._tasks):
            task.cancel()

    async def close(self) -> None:
        """Cancel all tasks, and return when they have ended."""
        self.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._failed(error)


async def every(
    seconds: float, function: Callable[[], object], failed: Callable[[Exception], None], *, first: float = 0.0
) -> None:
    """Call `function`, which may be async, `first` seconds from now and then `seconds` after each of its ends, until
    this is cancelled. To be run in a group or a `Background`.

    An error of it does not end this: `failed` is called with it, and is called again only after a success. Not for a
    loop that ends by itself or with an error, nor for one that computes its pause, such as the watch for a stall of
    this process, which must be on time.
    """
    has_failed = False
    await asyncio.sleep(first)
    while True:
        try:
            result = function()
            if inspect.isawaitable(result):
                await result
            has_failed = False
        except Exception as error:
            if not has_failed:
                failed(error)
            has_failed = True
        await asyncio.sleep(seconds)


@contextlib.asynccontextmanager
async def beside(work: Awaitable[T]) -> AsyncIterator[asyncio.Future[T]]:
    """Have work go on while the block runs, which gets its task; then the work is cancelled, and has ended.

    The block may end early for an error of the work. One that it has not looked at is raised after it, unless the block
    itself has failed.
    """
    task = asyncio.ensure_future(work)
    # Also if this wait is cancelled: asyncio would print a traceback for an error that nothing has retrieved.
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    loop_has_gone = False
    try:
        yield task
    except GeneratorExit:
        loop_has_gone = True
        raise
    finally:
        if not loop_has_gone:
            task.cancel()
            await asyncio.wait([task])
    if not task.cancelled():
        task.result()


def _first(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error because of which the others in the group were cancelled, if any was."""
    first = failed.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
