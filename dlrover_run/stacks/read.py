"""Reads the stacks of workers of this node, from outside, each in a thread of its own.

A read takes about a millisecond. But the kernel may make one wait for the worker: a thread of it that maps a file of a
server that does not answer locks its memory. So the agent does not read in its own thread, and waits STACKS_TIMEOUT.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from dlrover_run.background import TimeLimit
from dlrover_run.job_status.stacks import StackProblem
from dlrover_run.processes.tree import read_stat
from dlrover_run.stacks.reader import NoPython, StackReader
from dlrover_run.stacks.stack import Stack

STACKS_TIMEOUT = 2.0
"""Seconds that the reads have."""

PAUSE = 0.01
"""Seconds between two stacks of one worker: one that works is elsewhere by then."""

Worker = TypeVar("Worker", int, str, int | str)


class Reading(NamedTuple):
    """The stacks of a worker, one after the other, and why there is none. `state` is the letter of its process."""

    stacks: tuple[Stack, ...] = ()
    problem: StackProblem | None = None
    state: str = ""


_blocked: dict[int, tuple[threading.Thread, float]] = {}
"""The thread that reads each process, and when it began."""


async def read_stacks(
    pids: Mapping[Worker, int],
    *,
    main: bool = False,
    times: int = 1,
    enough: Callable[[list[Stack]], bool] | None = None,
) -> dict[Worker, Reading]:
    """The stacks of these processes: of all threads, or of the `main` thread alone, so many times, or until they are
    `enough`. One that cannot be read in STACKS_TIMEOUT is read by no other thread until that one has ended."""
    loop = asyncio.get_running_loop()
    found: dict[Worker, Reading] = {}
    waiting: dict[asyncio.Future[Reading], Worker] = {}
    for worker, pid in pids.items():
        thread, began = _blocked.get(pid, (None, 0.0))
        if thread is not None and thread.is_alive() and time.monotonic() - began > STACKS_TIMEOUT:
            found[worker] = Reading(problem=StackProblem.NO_ANSWER)
        else:
            waiting[_begin(loop, pid, main, times, enough)] = worker
    if waiting:
        with contextlib.suppress(TimeoutError):
            async with TimeLimit(STACKS_TIMEOUT):
                await asyncio.wait(waiting)
        for reading, worker in waiting.items():
            found[worker] = reading.result() if reading.done() else Reading(problem=StackProblem.NO_ANSWER)
    return found


def _begin(
    loop: asyncio.AbstractEventLoop,
    pid: int,
    main: bool,
    times: int,
    enough: Callable[[list[Stack]], bool] | None,
) -> asyncio.Future[Reading]:
    future: asyncio.Future[Reading] = loop.create_future()

    def note(reading: Reading | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        elif reading is not None:
            future.set_result(reading)

    def work() -> None:
        reading: Reading | None = None
        error: BaseException | None = None
        try:
            reading = read_process_stacks(pid, main=main, times=times, enough=enough)
        except BaseException as raised:
            error = raised
        _blocked.pop(pid, None)
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            loop.call_soon_threadsafe(note, reading, error)

    thread = threading.Thread(target=work, name=f"stacks of {pid}", daemon=True)
    _blocked[pid] = thread, time.monotonic()
    thread.start()
    return future


def read_process_stacks(
    pid: int, *, main: bool = False, times: int = 1, enough: Callable[[list[Stack]], bool] | None = None
) -> Reading:
    """As `read_stacks`, of one process, in this thread."""
    began = time.monotonic()
    state = _state(pid)
    if state in "XZ":
        return Reading(problem=StackProblem.ENDED, state=state)
    if state == "D":
        # It may hold the lock of its memory for as long as the disk does not answer.
        return Reading(problem=StackProblem.BLOCKED, state=state)
    try:
        reader = StackReader(pid)
    except NoPython:
        return Reading(problem=StackProblem.NO_PYTHON, state=state)
    except PermissionError:
        return Reading(problem=StackProblem.NOT_PERMITTED, state=state)
    except OSError:
        return Reading(problem=StackProblem.ENDED, state=state)
    stacks: list[Stack] = []
    try:
        for number in range(times):
            if number:
                time.sleep(PAUSE)
            stacks.append(reader.read(main=main))
            late = time.monotonic() - began > STACKS_TIMEOUT / 2
            if late or (enough is not None and enough(stacks)):
                # On a machine without a free processor fewer stacks are better than none.
                break
    finally:
        reader.close()
    stacks = [one for one in stacks if one.threads]
    # An interpreter without threads has not begun, or has ended.
    return Reading(tuple(stacks), None if stacks else StackProblem.NO_PYTHON, state)


class RoundStacks:
    """The stacks of the workers of one round by rank, or of tasks by their numbers; `pids` are those that run.
    `on_denied` is called once, with no right to read them."""

    def __init__(self, pids: Callable[[], Mapping[int, int]], on_denied: Callable[[], None] = lambda: None) -> None:
        self._pids = pids
        self._on_denied = on_denied
        self._is_denied = False

    async def read(
        self,
        ranks: Iterable[int],
        *,
        main: bool = False,
        times: int = 1,
        enough: Callable[[list[Stack]], bool] | None = None,
    ) -> dict[int, tuple[Stack, ...]]:
        """The stacks of these workers, of each that can be read; see `read_stacks`."""
        pids = self._pids()
        here = {rank: pids[rank] for rank in ranks if rank in pids}
        found = await read_stacks(here, main=main, times=times, enough=enough)
        if not self._is_denied and any(one.problem is StackProblem.NOT_PERMITTED for one in found.values()):
            self._is_denied = True
            self._on_denied()
        return {rank: one.stacks for rank, one in found.items() if one.stacks}


def _state(pid: int) -> str:
    try:
        return read_stat(pid)[1][0].decode()
    except OSError:
        return "X"
