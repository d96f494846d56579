"""Processes whose event loop runs asyncio's own tasks, futures, events and timeouts in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import traceback
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any

from simulation.timeline import Broken, Killed, Process, Timeline

ORDINARY = (asyncio.CancelledError, asyncio.TimeoutError, StopAsyncIteration, GeneratorExit)
"""Errors raised by Python that may end a task. Any other error raised by Python is a defect."""

MAX_CLOSES = 20
"""How often a coroutine that is closed may wait again before it ends."""


class Steps(Coroutine[Any, Any, Any]):
    """A coroutine whose failure is passed to `failed` before its task stores it."""

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, Any],
        failed: Callable[[BaseException], None],
        killed: Callable[[], asyncio.Future[Any]],
    ) -> None:
        self._coroutine = coroutine
        self._failed = failed
        self._killed = killed

    def send(self, value: Any) -> Any:
        return self._step(lambda: self._coroutine.send(value))

    def throw(self, *error: Any) -> Any:
        return self._step(lambda: self._coroutine.throw(*error))

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise AssertionError("only a task runs this")

    def _step(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except StopIteration:
            raise
        except Killed:
            # The process was killed in the middle of this step: the task waits forever.
            never = self._killed()
            never._asyncio_future_blocking = True
            return never
        except BaseException as error:
            self._failed(error)
            raise


class NumberedFuture(asyncio.Future[Any]):
    """A future whose hash does not depend on its address in memory, so that a seed replays exactly."""

    def __init__(self, number: int, **given: Any) -> None:
        self.number = number
        super().__init__(**given)

    def __hash__(self) -> int:
        return self.number


class NumberedTask(asyncio.Task[Any]):
    """The same for a task."""

    def __init__(self, number: int, coroutine: Coroutine[Any, Any, Any], **given: Any) -> None:
        self.number = number
        super().__init__(coroutine, **given)

    def __hash__(self) -> int:
        return self.number


class Running:
    """A loop is the running one within the block. A generator would take as long as many of the events."""

    __slots__ = ("_before", "_loop")

    def __init__(self, loop: Any) -> None:
        self._loop = loop

    def __enter__(self) -> None:
        self._before = asyncio._get_running_loop()
        asyncio._set_running_loop(self._loop)

    def __exit__(self, *_: object) -> None:
        asyncio._set_running_loop(self._before)


class LoopProcess(Process):
    """A process that is the running event loop of its callbacks, and can run tasks.

    After it is killed nothing runs in it: its tasks are never woken again, and `dispose` closes them.
    """

    def __init__(self, timeline: Timeline, name: str) -> None:
        super().__init__(timeline, name)
        self._tasks: list[tuple[asyncio.Task[Any], Steps]] = []
        self._numbers = itertools.count()

    def create_future(self) -> asyncio.Future[Any]:
        return NumberedFuture(next(self._numbers), loop=self._as_loop)

    def create_task(
        self, coroutine: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        """As in asyncio. A task that fails because of a defect fails the run."""
        steps = Steps(coroutine, self._note_failure, self._note_kill)
        given = {} if context is None else {"context": context}
        task = NumberedTask(next(self._numbers), steps, loop=self._as_loop, name=name, **given)
        self._tasks = [entry for entry in self._tasks if not entry[0].done()] + [(task, steps)]
        return task

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return False

    def is_running(self) -> bool:
        return asyncio._get_running_loop() is self._as_loop

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Fail the run where asyncio would print that the exception of a task was never retrieved. A late result of a
        request that has been given up does not count."""
        if self.alive and isinstance(context.get("task") or context.get("future"), asyncio.Task):
            self._break(f"{context.get('message')}: {context.get('exception')!r}")

    def dispose(self) -> None:
        """Close the coroutines that still wait, without a message."""
        self.end()
        # A new list: code that still iterates over the former list does not see a change.
        tasks, self._tasks = self._tasks, []
        with self._running():
            for task, steps in tasks:
                if task.done():
                    continue
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                for _ in range(MAX_CLOSES):
                    with contextlib.suppress(Exception):
                        steps.close()
                        break

    def _run(self, kind: int, callback: Callable[[], None]) -> None:
        with self._running():
            super()._run(kind, callback)

    @property
    def _as_loop(self) -> Any:
        return self

    def _running(self) -> Running:
        return Running(self._as_loop)

    def _note_kill(self) -> asyncio.Future[Any]:
        self.note("is killed")
        self.died()
        return self.create_future()

    def _note_failure(self, error: BaseException) -> None:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, Broken):
                # Perhaps hidden by what its own task did on the way out.
                self.timeline.break_off(cause)
                return
            cause = cause.__context__
        if type(error).__module__ == "builtins" and not isinstance(error, ORDINARY):
            where = "; ".join(
                f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)[-4:]
            )
            self._break(f"{error!r} at {where}")

    def _break(self, what: str) -> None:
        self.timeline.break_off(Broken(f"{self.name}: a task has failed: {what}"))
