"""The store of a job whose workers outlive their round: a process of the agent, with torch, that no worker owns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from dlrover_run import linux
from dlrover_run.agent.starter import Starter
from dlrover_run.failures.causes import describe_exit_code
from dlrover_run.group_store.__main__ import LISTENS
from dlrover_run.output.streams import tail_text
from dlrover_run.supervisor.ports import HeldPort
from dlrover_run.supervisor.process import ManagedProcess, ProcessSpec

FOLDER = str(Path(__file__).resolve().parent.parent / "group_store")

OUTPUT_BYTES = 16 * 1024
"""The end of the output of the process that is read when it has ended."""

END_TIMEOUT = 5.0
"""Seconds that `close` waits for the end of the process after SIGKILL."""


class GroupStore:
    """The store that this node runs, or could run, at `port`. It ends with the agent, also by SIGKILL.

    `on_end` is called when it has ended by itself, with a sentence for the user. Then `port` is another one, because a
    port stands for one store; or 0 if the process could not listen, because it would fail again.
    """

    def __init__(self, python: str, on_end: Callable[[str], None]) -> None:
        self._python = python
        self._on_end = on_end
        self._held = HeldPort()
        self.port = self._held.number
        self._process: ManagedProcess[ProcessSpec] | None = None
        self._output = -1
        self._ended = asyncio.Event()
        self._closing = False

    @property
    def pids(self) -> set[int]:
        """The pid of the process, while it runs."""
        return set() if self._process is None else {self._process.pid}

    async def start(self, starter: Starter, environment: Mapping[str, str]) -> None:
        """Start the process, if it does not run. Raises OSError."""
        if self._process is not None or not self.port or self._closing:
            return
        self._output = linux.memfd_create("dlrover-run store")
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        args = (str(self.port),)
        spec = ProcessSpec(
            name="the store",
            argv=(self._python, "-u", FOLDER, *args),
            args=args,
            environment=environment,
            stdio=(null, self._output, self._output),
        )
        self._ended.clear()
        try:
            pid = await starter.start(spec, FOLDER)
        finally:
            os.close(null)
        self._process = ManagedProcess(pid, spec, self._note_end)

    async def close(self) -> None:
        """End the process, and release the port."""
        self._closing = True
        if self._process is not None:
            self._process.stop(signal.SIGKILL, 0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), END_TIMEOUT)
        self._held.release()

    def _note_end(self, process: ManagedProcess[ProcessSpec]) -> None:
        size = os.fstat(self._output).st_size
        start = max(0, size - OUTPUT_BYTES)
        lines = tail_text(os.pread(self._output, OUTPUT_BYTES, start), cut=start > 0).splitlines()
        os.close(self._output)
        self._process = None
        self._ended.set()
        self._held.release()
        if self._closing:
            return
        could_listen = LISTENS in lines
        self.port = 0
        if could_listen:
            self._held = HeldPort()
            self.port = self._held.number
        last = next((line for line in reversed(lines) if line.strip() and line != LISTENS), "")
        why = f" ({last[:200]})" if last else ""
        then = "the next round has another one, and its workers start anew" if could_listen else "workers restart"
        self._on_end(f"the store of the workers {describe_exit_code(process.code or 0)}{why}: {then}")
