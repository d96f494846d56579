"""Asks the workers of this node for their stacks: one memory file each, into which `faulthandler` writes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from dlrover_run.evidence.processes import catches
from dlrover_run.stall.register import MARKER, VARIABLE
from dlrover_run.stall.stacks import MAX_DUMP_BYTES, Stack, is_complete, is_cut_off, parse

STACKS_TIMEOUT = 1.0
"""Seconds that the workers have to write their stacks. It takes milliseconds; a stopped worker writes none."""

STACKS_INTERVAL = 0.01
"""Seconds between two looks at what the workers have written: the kernel does not report writes to a memory file."""

MAX_FILE_BYTES = 4 * 1024 * 1024
"""A file of stacks that is larger is emptied before the next request."""

Worker = TypeVar("Worker", bound=Hashable)


class _Registered(NamedTuple):
    """What a worker has registered: the signal for all threads, that for the main thread alone, 0 for none, and the
    descriptor of its file."""

    signal: int
    main_signal: int
    fd: int


class _Request(NamedTuple):
    """A request that was sent to this process by that signal."""

    pid: int
    signal: int


class StackFiles:
    """The files of the workers of one round, by local rank. Nothing is on a disk."""

    def __init__(self, local_ranks: int) -> None:
        self._fds = [_create_file(rank) for rank in range(local_ranks)]
        self._read = [0] * local_ranks
        self._written = [0] * local_ranks
        self._registered: dict[int, _Registered] = {}
        self._requests: dict[int, _Request] = {}

    def path(self, local_rank: int) -> str:
        """The path at which the worker opens its file; it needs no inherited descriptor."""
        return f"/proc/{os.getpid()}/fd/{self._fds[local_rank]}"

    def environment(self, local_rank: int) -> dict[str, str]:
        """What tells the worker at its start where its file is."""
        return {VARIABLE: self.path(local_rank)}

    def renew(self, local_rank: int) -> None:
        """Make an empty file for another process in the place of that local rank."""
        created = _create_file(local_rank)
        os.close(self._fds[local_rank])
        self._fds[local_rank] = created
        self._read[local_rank] = self._written[local_rank] = 0
        self._registered.pop(local_rank, None)
        self._requests.pop(local_rank, None)

    def request(self, local_rank: int, pid: int, *, main: bool = False) -> bool:
        """Ask a worker for its stacks, or for that of its `main` thread alone. False if it cannot answer: it runs no
        Python, has not begun, has replaced itself by another program, blocks the signal or has closed the file. The
        signal would end such a process.

        A request that has no answer yet stands: two that ask at a time get the same one, and a stopped worker has one
        signal to handle when it continues.
        """
        registered = self._registration(local_rank)
        if registered is None:
            return False
        try:
            same = os.stat(f"/proc/{pid}/fd/{registered.fd}").st_ino == os.fstat(self._fds[local_rank]).st_ino
        except OSError:
            return False
        number = (main and registered.main_signal) or registered.signal
        if not same or not catches(pid, number):
            return False
        if local_rank in self._requests and self.answer(local_rank) is None:
            return True
        size = self._size(local_rank)
        if size > MAX_FILE_BYTES:
            self._written[local_rank] += size
            os.ftruncate(self._fds[local_rank], 0)
            size = 0
        self._read[local_rank] = size
        return self._send(local_rank, _Request(pid, number))

    def answer(self, local_rank: int) -> Stack | None:
        """What a worker has written since the last request; None as long as it is not complete, and after `close`. A
        worker whose main thread was left out is asked for that."""
        if not self._fds:
            return None
        data = os.pread(self._fds[local_rank], MAX_DUMP_BYTES, self._read[local_rank])
        text = data.decode(errors="replace")
        if is_complete(text):
            return parse(text)
        if is_cut_off(text):
            self._ask_for_main(local_rank)
        return None

    def dumped(self, local_rank: int) -> int:
        """All bytes that the worker has written here."""
        return self._written[local_rank] + self._size(local_rank)

    def close(self) -> None:
        """Free the memory. Idempotent."""
        while self._fds:
            os.close(self._fds.pop())

    def _size(self, local_rank: int) -> int:
        return os.fstat(self._fds[local_rank]).st_size

    def _ask_for_main(self, local_rank: int) -> None:
        request, registered = self._requests.get(local_rank), self._registration(local_rank)
        if request is None or registered is None:
            return
        main = registered.main_signal
        if main and request.signal != main and catches(request.pid, main):
            self._send(local_rank, request._replace(signal=main))

    def _send(self, local_rank: int, request: _Request) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(request.pid, request.signal)
            self._requests[local_rank] = request
            return True
        return False

    def _registration(self, local_rank: int) -> _Registered | None:
        if not self._fds:
            return None
        if local_rank not in self._registered:
            fields = os.pread(self._fds[local_rank], 64, 0).partition(b"\n")[0].split()
            if len(fields) != 4 or not all(field.isdigit() for field in fields) or int(fields[0]) != MARKER:
                return None
            found = _Registered(*map(int, fields[1:]))
            signals = [number for number in found[:2] if number]
            if not signals or not all(signal.SIGRTMIN < number <= signal.SIGRTMAX for number in signals):
                return None
            self._registered[local_rank] = found
        return self._registered[local_rank]


def _create_file(local_rank: int) -> int:
    return os.memfd_create(f"dlrover-run stacks {local_rank}", os.MFD_CLOEXEC)


class RoundStacks:
    """The stacks of the workers of one round by rank: `workers` gives the local rank and the pid of each."""

    def __init__(self, files: StackFiles, workers: Mapping[int, tuple[int, int]]) -> None:
        self._files = files
        self._workers = dict(workers)

    def request(self, rank: int, *, main: bool = False) -> bool:
        """As `StackFiles.request`."""
        return self._files.request(*self._workers[rank], main=main)

    def answer(self, rank: int) -> Stack | None:
        """As `StackFiles.answer`."""
        return self._files.answer(self._workers[rank][0])

    def dumped(self, rank: int) -> int:
        """As `StackFiles.dumped`."""
        return self._files.dumped(self._workers[rank][0])


async def gather_stacks(
    workers: Iterable[Worker],
    request: Callable[[Worker], bool],
    answer: Callable[[Worker], Stack | None],
    stopped: Container[Worker] = (),
) -> dict[Worker, Stack]:
    """The stacks of these workers: of those that can be asked, and answer within STACKS_TIMEOUT. Those that are
    `stopped` are asked, and not waited for."""
    asked = [worker for worker in workers if request(worker)]
    found: dict[Worker, Stack] = {}
    loop = asyncio.get_running_loop()
    end = loop.time() + STACKS_TIMEOUT
    while any(worker not in found and worker not in stopped for worker in asked) and loop.time() < end:
        await asyncio.sleep(STACKS_INTERVAL)
        for worker in asked:
            if worker not in found and (stack := answer(worker)) is not None:
                found[worker] = stack
    return found
