"""Work of an event loop: what ends it, who learns of its errors, and how long it is waited for.

Each task of the product is started here or in a group, so no error ends unseen, and no task outlives its owner. Each
wait with a limit goes through here or through `asyncio.wait`, so that a pause of this process costs no answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from dlrover_run.processes import signals

LONG_PAUSE = 0.5
"""Seconds by which a timer is late at times on a busy machine. By more, and this process was stopped or starved."""

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


class TimeLimit:
    """Raises TimeoutError at the end of a block that takes longer than `seconds`; None sets no limit.

    In place of `asyncio.timeout` and `asyncio.wait_for`. After a pause of this process (SIGSTOP, a frozen group, a
    starved machine) the timer and an answer that has come meanwhile are due in the same turn of the loop, and these two
    drop the answer (the second from Python 3.12 on). Here what has come is read first; and if the timer is late by more
    than LONG_PAUSE, the whole time counts again, because an answer may take several turns, and other threads.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = None if seconds is None else max(0.0, seconds)
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> TimeLimit:
        self._timeout = await asyncio.timeout(None).__aenter__()
        if self._seconds is not None:
            self._begin(self._seconds)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def shorten(self, seconds: float) -> None:
        """The block ends in this many seconds at the latest. For a caller outside of the block, while that runs."""
        due = asyncio.get_running_loop().time() + seconds
        if self._timeout.when() is None and (self._timer is None or due < self._due):
            self._begin(seconds)

    def _begin(self, seconds: float) -> None:
        self._cancel()
        loop = asyncio.get_running_loop()
        self._seconds, self._due = seconds, loop.time() + seconds
        self._timer = loop.call_at(self._due, self._expire)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        assert self._seconds is not None, "the timer runs"
        now = asyncio.get_running_loop().time()
        if now - self._due > LONG_PAUSE:
            self._begin(self._seconds)
        else:
            # In the next turn of the loop, after the tasks that wait for what is read in this one.
            self._timeout.reschedule(now)


async def wait_for_event(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for an event until a time of this process's own, None for ever; return whether it is set.

    Unlike a `TimeLimit`, a pause of this process does not prolong it.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None if seconds is None else max(0.0, seconds)):
            await event.wait()
    return event.is_set()


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


def begin_in_thread(work: Callable[[], T], name: str) -> tuple[asyncio.Future[T], threading.Thread]:
    """Begin work that may never return: a name server, a driver. What it returns or raises, and its thread, a daemon
    that no exit waits for. The caller, in a running loop, waits with a limit; a later answer is dropped."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[T] = loop.create_future()

    def note(set_answer: Callable[[], None]) -> None:
        if not found.done():
            set_answer()

    def run() -> None:
        try:
            answer = work()
        except Exception as error:
            set_answer = partial(found.set_exception, error)
        else:
            set_answer = partial(found.set_result, answer)
        with contextlib.suppress(RuntimeError):  # The loop may be closed by now.
            loop.call_soon_threadsafe(note, set_answer)

    thread = threading.Thread(target=run, name=name, daemon=True)
    with signals.blocked_in_new_threads():
        thread.start()
    return found, thread


def _first(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error because of which the others in the group were cancelled, if any was."""
    first = failed.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
