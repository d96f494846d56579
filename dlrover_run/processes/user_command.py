"""One run of a command of the user: its time limit, its end, and the last line of its output."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping

from dlrover_run.failures.causes import describe_exit_code
from dlrover_run.processes.process import ManagedProcess, ProcessSpec, spawn

STOP_GRACE = 2.0
"""Seconds from SIGTERM to SIGKILL for a command that is stopped."""

MAX_OUTPUT = 4096
"""Bytes of the end of the command's output that are kept."""

MAX_LINE = 200
"""Characters of its last line that are quoted."""


class UserCommand:
    """A command that has begun, without a shell. It has `seconds` to end, and ends with this process.

    `name` stands for it in messages, and `on_end` is called once, when it has ended. Raises OSError if it cannot be
    started. To be used in the thread of a running loop.
    """

    def __init__(
        self,
        name: str,
        argv: tuple[str, ...],
        environment: Mapping[str, str],
        seconds: float,
        on_end: Callable[[UserCommand], None] = lambda ended: None,
    ) -> None:
        self._on_end = on_end
        self._allowed = seconds
        self._loop = asyncio.get_running_loop()
        self._began = time.monotonic()
        self.seconds = 0.0
        """How long it has run, once it has ended."""
        self._output = b""
        self._is_late = False
        self._changed = asyncio.Event()
        self._reading, writing = os.pipe()
        os.set_blocking(self._reading, False)
        spec = ProcessSpec(
            name=name,
            argv=argv,
            environment=environment,
            stdio=(subprocess.DEVNULL, writing, writing),
            # A script of a shell is stopped together with the program that it has started.
            signal_group=True,
        )
        try:
            self.pid = spawn(spec)
            self._process = ManagedProcess(self.pid, spec, self._note_end, lambda _: self._changed.set())
        except (ValueError, subprocess.SubprocessError) as error:
            # A variable that cannot be passed on, or what comes between fork and exec.
            os.close(self._reading)
            raise OSError(str(error)) from error
        except OSError:
            os.close(self._reading)
            raise
        finally:
            os.close(writing)
        self._loop.add_reader(self._reading, self._read)
        self._limit = self._loop.call_later(seconds, self._on_limit)

    @property
    def code(self) -> int | None:
        """Its exit code as in `subprocess`; None while it runs."""
        return self._process.code

    @property
    def problem(self) -> str:
        """A clause, empty if the command has succeeded."""
        if self._is_late:
            problem = f"it did not end within {self._allowed:g} s, and was stopped"
        elif self._process.stopped_with is not None:
            problem = "it was stopped with this node"
        elif self.code:
            problem = f"it {describe_exit_code(self.code)}"
        else:
            return ""
        lines = self._output.decode(errors="replace").splitlines()
        last = next((" ".join(line.split()) for line in reversed(lines) if line.strip()), "")
        return f"{problem}: {last[:MAX_LINE]}" if last else problem

    def limit(self, seconds: float) -> None:
        """It has no more than this many seconds from now."""
        if self._process.live and self._loop.time() + seconds < self._limit.when():
            self._allowed = round(time.monotonic() - self._began + seconds, 1)
            self._limit.cancel()
            self._limit = self._loop.call_later(seconds, self._on_limit)

    def stop(self) -> None:
        """End it, by SIGKILL after `STOP_GRACE`. Idempotent."""
        self._process.stop(signal.SIGTERM, STOP_GRACE)

    async def ended(self) -> None:
        """Return when it has ended, or when the kernel does not end it."""
        while self._process.live and not self._process.stuck:
            self._changed.clear()
            await self._changed.wait()

    def _on_limit(self) -> None:
        self._is_late = True
        self.stop()

    def _note_end(self, _: ManagedProcess[ProcessSpec]) -> None:
        self._limit.cancel()
        self.seconds = time.monotonic() - self._began
        # A process that it has left behind may keep the pipe open.
        self._read()
        self._loop.remove_reader(self._reading)
        os.close(self._reading)
        self._changed.set()
        self._on_end(self)

    def _read(self) -> None:
        try:
            data = os.read(self._reading, 1 << 16)
        except BlockingIOError:
            return
        self._output = (self._output + data)[-MAX_OUTPUT:]
        if not data:
            self._loop.remove_reader(self._reading)
