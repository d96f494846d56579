"""A store that this node serves at a held port: a process without torch, which starts with its first client.

The agent listens itself until then, so a job whose script uses no store has no such process, a client never finds that
no process listens, and a start does not wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from dlrover_run.failures.causes import describe_exit_code
from dlrover_run.processes.ports import HeldPort
from dlrover_run.processes.process import ManagedProcess, ProcessSpec, spawn
from dlrover_run.workers.tcp_store.server import CLIENT, NODE, WARNING

PACKAGE = str(Path(__file__).resolve().parent.parent)

BOOT = """\
import sys
package = type(sys)("dlrover_run")
package.__path__ = [sys.argv[1]]
sys.modules["dlrover_run"] = package
from dlrover_run.workers.tcp_store.server import run
run(int(sys.argv[2]))
"""
"""What the interpreter is given with `-c`: without site packages, it starts in a few milliseconds."""

MAX_LINE = 4096
"""Bytes of the output of the process that are kept for a line whose end has not been read."""


class StoreProcess:
    """The store at the port `held`, which it releases. It ends with `release`, and with the agent, also by SIGKILL.

    `on_client` is called with the address of the first client, `on_node` with the rank of a node whose workers have
    ended, `log` with a sentence for the user, and `on_end` with a clause that says how the process has ended by itself.
    To be used in the thread of a running loop.
    """

    def __init__(
        self,
        held: HeldPort,
        log: Callable[[str], None],
        on_end: Callable[[str], None],
        on_client: Callable[[str], None] = lambda address: None,
        on_node: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self.number = held.number
        self._held = held
        self._log = log
        self._on_end = on_end
        self._on_client = on_client
        self._on_node = on_node
        self._loop = asyncio.get_running_loop()
        self._process: ManagedProcess[ProcessSpec] | None = None
        self._listener = -1
        self._output = -1
        self._partial = b""
        self._last = ""
        self._released = False
        self.used = False
        """Whether a client has connected."""

    @property
    def pids(self) -> set[int]:
        """The pid of the process, while it runs."""
        return set() if self._process is None else {self._process.pid}

    def listen(self) -> None:
        """Listen, and start the process with the first client. Raises OSError."""
        if self._listener < 0 and not self._released:
            self._listener = self._held.listen().fileno()
            self._loop.add_reader(self._listener, self.start)

    def start(self) -> None:
        """Start the process now, because clients are expected. `listen` comes first."""
        if self._listener < 0 or self._process is not None or self._released:
            return
        # From now on the process accepts.
        self._loop.remove_reader(self._listener)
        output, theirs = os.pipe()
        os.set_blocking(output, False)
        os.set_blocking(theirs, False)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        spec = ProcessSpec(
            name="the store",
            argv=(sys.executable, "-I", "-S", "-c", BOOT, PACKAGE, str(self._listener)),
            environment=os.environ,
            stdio=(null, theirs, theirs),
            fds=(self._listener,),
            directory="/",
        )
        try:
            pid = spawn(spec)
        except OSError as error:
            os.close(output)
            self._released = True
            self._held.release()
            self._on_end(f"cannot be started ({error.strerror or error})")
            return
        finally:
            spec.close_stdio()
        self._output = output
        self._loop.add_reader(output, self._read)
        self._process = ManagedProcess(pid, spec, self._note_end)

    def release(self) -> None:
        """End the process, and release the port. Idempotent."""
        if self._released:
            return
        self._released = True
        if self._listener >= 0:
            self._loop.remove_reader(self._listener)
        self._held.release()
        if self._process is not None:
            self._process.stop(signal.SIGKILL, 0)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if not (data := os.read(self._output, 65536)):
                self._close_output()
                return
            *lines, self._partial = (self._partial + data).split(b"\n")
            self._partial = self._partial[-MAX_LINE:]
            for line in lines:
                self._take(line.decode(errors="replace"))

    def _take(self, line: str) -> None:
        if line.startswith(CLIENT):
            self.used = True
            self._on_client(line.removeprefix(CLIENT))
        elif line.startswith(NODE):
            self._on_node(int(line.removeprefix(NODE)))
        elif line.startswith(WARNING):
            self._log(line.removeprefix(WARNING))
        elif line.strip():
            self._last = line

    def _close_output(self) -> None:
        if self._output >= 0:
            self._loop.remove_reader(self._output)
            os.close(self._output)
            self._output = -1

    def _note_end(self, process: ManagedProcess[ProcessSpec]) -> None:
        if self._output >= 0:
            self._read()
            self._close_output()
        self._process = None
        if self._released:
            return
        # A new store would not have what the old one held: clients must not take it for the same.
        self._released = True
        self._held.release()
        why = f" ({self._last[:200]})" if self._last else ""
        self._on_end(f"{describe_exit_code(process.code or 0)}{why}")
