"""The process that listens to the driver, as the agent sees it: its start, its messages, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import Callable

import msgspec

from dlrover_run import launch_request
from dlrover_run.background import TimeLimit, wait_for_event
from dlrover_run.devices.gpu_state import GpuState
from dlrover_run.features.device_errors.messages import (
    ASK,
    MAX_MESSAGE,
    States,
    WatchedGpu,
    Watching,
    XidSeen,
    decode,
)
from dlrover_run.processes.process import ManagedProcess, ProcessSpec, spawn
from dlrover_run.processes.unix_sockets import messages

ANSWER_TIMEOUT = 5.0
"""Seconds for the states of the GPUs, for which the report of a failure waits: NVML takes milliseconds for them, unless
the driver is stuck, as it may be after the error that is looked for. A restart on that GPU would wait for longer."""

END_TIMEOUT = 5.0
"""Seconds for the end of the process after SIGKILL."""


class DriverListener:
    """Starts the process again with `start` if it has ended. `on_error` is called with each error that it reports, and
    `on_watching` once it listens. To be used in the thread of a running loop."""

    def __init__(
        self, on_error: Callable[[XidSeen], None], on_watching: Callable[[tuple[WatchedGpu, ...]], None]
    ) -> None:
        self.gpus: tuple[WatchedGpu, ...] = ()
        self._on_error = on_error
        self._on_watching = on_watching
        self._control: socket.socket | None = None
        self._process: ManagedProcess[ProcessSpec] | None = None
        self._ended = asyncio.Event()
        self._requests: deque[asyncio.Future[dict[int, GpuState]]] = deque()
        """The requests that have no answer yet, the earliest first."""

    @property
    def pids(self) -> set[int]:
        """The pid of the process, while it runs."""
        return set() if self._process is None else {self._process.pid}

    def start(self) -> None:
        """Begin to listen; idempotent while the process runs. Raises OSError."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = launch_request.command(theirs.fileno(), "dlrover_run.features.device_errors.process")
        spec = ProcessSpec(name="dlrover-devices", argv=tuple(command), environment=os.environ, fds=(theirs.fileno(),))
        with theirs:
            try:
                pid = spawn(spec)
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        self._control = ours
        self._ended.clear()
        asyncio.get_running_loop().add_reader(ours.fileno(), self._receive)
        self._process = ManagedProcess(pid, spec, self._note_end)

    async def states(self) -> dict[int, GpuState]:
        """The states of all GPUs by their index; none if they are not known within ANSWER_TIMEOUT, or at once if an
        earlier request has had no answer yet: the workers of a node fail together, and are explained one by one."""
        is_stuck = bool(self._requests) and self._requests[0].done()
        if self._control is None or not self.gpus or is_stuck:
            return {}
        answer: asyncio.Future[dict[int, GpuState]] = asyncio.get_running_loop().create_future()
        with contextlib.suppress(OSError, TimeoutError):
            self._control.send(ASK)
            self._requests.append(answer)
            async with TimeLimit(ANSWER_TIMEOUT):
                return await answer
        return {}

    async def close(self) -> None:
        """End the process. Idempotent."""
        if self._process is not None:
            self._process.send(signal.SIGKILL)
            # A driver that is stuck may hold it for longer; then it is left to the kernel.
            await wait_for_event(self._ended, END_TIMEOUT)

    def _receive(self) -> None:
        assert self._control is not None, "the process runs"
        for data in messages(self._control, MAX_MESSAGE):
            with contextlib.suppress(msgspec.DecodeError):
                self._take(data)

    def _take(self, data: bytes) -> None:
        match decode(data):
            case Watching(gpus=gpus):
                self.gpus = gpus
                self._on_watching(gpus)
            case XidSeen() as error:
                self._on_error(error)
            case States(gpus=states):
                if self._requests and not (answer := self._requests.popleft()).done():
                    answer.set_result({state.index: state for state in states})

    def _note_end(self, process: ManagedProcess[ProcessSpec]) -> None:
        assert self._control is not None, "it is closed here only"
        self._receive()
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        while self._requests:
            if not (answer := self._requests.popleft()).done():
                answer.set_result({})
        self._control = self._process = None
        self._ended.set()
