"""Checkpoints in memory, as the agent sees them: a socket, and a process behind it from the first connection on.

The agent holds none of it, and waits for none of it while the job runs. The process has imported nothing of a training
framework; it survives the workers, and the kernel ends it with the agent.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping
from typing import Any

from dlrover_run import launch_request
from dlrover_run.background import TimeLimit, wait_for_event
from dlrover_run.coordination.records.activity import MemoryUse
from dlrover_run.failures.causes import describe_exit_code
from dlrover_run.processes.process import ManagedProcess, ProcessSpec, spawn
from dlrover_run.processes.unix_sockets import messages
from dlrover_run.words.text import counted

LINE_VARIABLE, TOKEN_VARIABLE, USED_VARIABLE, NODES_VARIABLE = (
    "DLROVER_CHECKPOINT_MEMORY",
    "DLROVER_CHECKPOINT_MEMORY_TOKEN",
    "DLROVER_CHECKPOINT_MEMORY_USED",
    "DLROVER_CHECKPOINT_MEMORY_NODES",
)
"""The variables of a worker; `training/memory_line.py` says what they mean."""

DRAIN_TIMEOUT = 600.0
"""Seconds after the end of the last worker in which what is held is written to the disk. A stop by a signal leaves only
`--shutdown-timeout`."""

RESTART_PAUSE = 1.0
"""Seconds after which a process that has ended by itself may have a successor."""

END_TIMEOUT = 5.0
"""Seconds for the end of the process after SIGKILL."""

MAX_CONTROL = 64 * 1024


class CheckpointMemory:
    """The socket and the process. `limit` is in MiB, None for the default, 0 for none of this. `show` prints a
    line. `secret` is the token of the job, by which nodes that hold copies of each other's files know each other."""

    def __init__(
        self, limit: int | None, show: Callable[[str], None], secret: str = "", *, single_node: bool = True
    ) -> None:
        self.use: MemoryUse | None = None
        """What is held; None if nothing has been held."""
        self._limit = limit
        self._show = show
        self._secret = secret
        self._single_node = single_node
        self._token = os.urandom(16).hex()
        self._listener: socket.socket | None = None
        self._name = ""
        self._control: socket.socket | None = None
        self._process: ManagedProcess[ProcessSpec] | None = None
        self._ended = asyncio.Event()
        self._closing = False
        self._draining: TimeLimit | None = None

    @property
    def pids(self) -> set[int]:
        """The pid of the process, while it runs."""
        return {self._process.pid} if self._process is not None else set()

    def open(self) -> None:
        """Listen for workers. Without a socket, they save to the disk."""
        if self._limit == 0:
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._name = f"dlrover-memory-{os.getpid()}-{os.urandom(8).hex()}"
        try:
            listener.bind(f"\0{self._name}")
            listener.listen(1024)
        except OSError as error:
            listener.close()
            self._show(f"warning: no checkpoint can be held in memory: {error.strerror or error}")
            return
        self._listener = listener
        self._wait_for_worker()

    def environment(self) -> Mapping[str, str]:
        """The variables by which a worker finds it."""
        if self._listener is None:
            return {}
        used = {} if self._process is None else {USED_VARIABLE: "1"}
        nodes = {} if self._single_node else {NODES_VARIABLE: "1"}
        return {LINE_VARIABLE: f"@{self._name}", TOKEN_VARIABLE: self._token, **used, **nodes}

    async def drain(self, timeout: float) -> None:
        """End the process once everything that it holds is on the disk; after `timeout` seconds it is killed."""
        self._stop_listening()
        if self._process is None or self._control is None:
            return
        self._closing = True
        try:
            self._control.send(json.dumps({"end": True}).encode())
            async with TimeLimit(timeout) as self._draining:
                await self._ended.wait()
        except TimeoutError:
            waiting = 0 if self.use is None else self.use.waiting
            was, lost = ("was", "is lost") if waiting == 1 else ("were", "are lost")
            files = counted(waiting, "checkpoint file")
            self._show(f"warning: {files} in memory {was} not written to the disk in time, and {lost}")
        except OSError:
            pass  # It has just ended.
        finally:
            self._draining = None
        await self.kill()

    def hurry(self, timeout: float) -> None:
        """Wait no longer than this for the disk, if `drain` waits: the node has to stop."""
        if self._draining is not None:
            self._draining.shorten(timeout)

    async def kill(self) -> None:
        """End the process with all that it holds."""
        self._closing = True
        self._stop_listening()
        if self._process is not None:
            self._process.send(signal.SIGKILL)
            # A dead disk may hold it for longer; then it is left to the kernel.
            await wait_for_event(self._ended, END_TIMEOUT)

    def _wait_for_worker(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._start)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    def _start(self) -> None:
        assert self._listener is not None, "a worker has connected"
        # From now on the process accepts.
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = launch_request.command(theirs.fileno(), "dlrover_run.features.checkpoints.process")
        spec = ProcessSpec(name="dlrover-memory", argv=tuple(command), environment=os.environ, fds=(theirs.fileno(),))
        with theirs:
            try:
                pid = spawn(spec)
            except OSError as error:
                ours.close()
                self._show(f"warning: no checkpoint can be held in memory: {error.strerror or error}")
                self._stop_listening()
                return
        ours.setblocking(False)
        limit = None if self._limit is None else self._limit * 2**20
        settings = json.dumps({"limit": limit, "token": self._token, "secret": self._secret}).encode()
        socket.send_fds(ours, [settings], [self._listener.fileno()])
        self._control = ours
        self._ended.clear()
        self._process = ManagedProcess(pid, spec, self._note_end)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._receive)

    def _receive(self) -> None:
        assert self._control is not None, "the process runs"
        for message in messages(self._control, MAX_CONTROL):
            self._take(json.loads(message))

    def _take(self, message: Mapping[str, Any]) -> None:
        if "figures" in message:
            self.use = MemoryUse(**message["figures"])
        else:
            self._show(message["sentence"])

    def _note_end(self, process: ManagedProcess[ProcessSpec]) -> None:
        assert self._control is not None, "it is closed here only"
        self._receive()
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        waiting = 0 if self.use is None else self.use.waiting
        self._control = self._process = self.use = None
        self._ended.set()
        if self._closing:
            return
        are = "is" if waiting == 1 else "are"
        lost = f"; {counted(waiting, 'file')} not on the disk yet {are} lost" if waiting else ""
        how = describe_exit_code(process.code or 0)
        self._show(f"warning: the process that holds checkpoints in memory {how}{lost}")
        asyncio.get_running_loop().call_later(RESTART_PAUSE, self._wait_for_worker)
