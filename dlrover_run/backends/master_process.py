"""A master as a child process: started, asked whether it listens, and its end told by the kernel."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from dlrover_run.memory_file import memory_file
from dlrover_run.process_tree import ends, signals
from dlrover_run.spec import MasterSpec

READY_TIMEOUT = 60.0
"""Seconds for a master to start and listen, which takes 0.2 s; a cold network disk can take many over its imports.

One that has not said anything by then is killed.
"""

MAX_READY = 65_536
"""Bytes of what a master says about its start; more is not read."""

MAX_REPORT = 65_536
"""Bytes of a line that a master reports; a longer one is passed on in pieces. It has room for 4,000 nodes."""

Say = Callable[[str], None]


class NotListening(Exception):
    """A master could not be started; the message is a clause that says why. `mistaken` says that it is because of its
    command line, such as a state directory that cannot be made, so that another attempt fails in the same way."""

    def __init__(self, reason: str, mistaken: bool = False) -> None:
        super().__init__(reason)
        self.mistaken = mistaken


class MasterProcess:
    """A master that listens at `listen` (HOST:PORT) with what `spec` says of token, TLS and journal.

    `say` is called with each line that it reports. It ends itself after `idle_timeout` seconds without a node; with
    `bound` also as soon as this process is gone, however it went.
    """

    pid: int

    def __init__(
        self, spec: MasterSpec, listen: str, say: Say, *, idle_timeout: float | None = None, bound: bool = False
    ) -> None:
        self._spec = spec
        self._listen = listen
        self._say = say
        self._idle_timeout = idle_timeout
        self._bound = bound
        self._parent_pipe = -1
        self._ready = -1
        self._ended = False

    def start(self, on_end: Callable[[], None]) -> None:
        """Start the process; `on_end` is called once when it has ended. Raises OSError when it cannot be started."""
        with contextlib.ExitStack() as passed_on, contextlib.ExitStack() as kept:

            def pipe() -> tuple[int, int]:
                """Our reading end and theirs, which is closed here once they have it."""
                ours, theirs = os.pipe()
                kept.callback(os.close, ours)
                passed_on.callback(os.close, theirs)
                return ours, theirs

            ready, theirs = pipe()
            reports, report = pipe()
            inherited = {"--ready-fd": theirs, "--report-fd": report}
            if self._spec.token:
                inherited["--token-fd"] = passed_on.enter_context(memory_file(self._spec.token.encode()))
            if self._bound:
                inherited["--parent-pipe-fd"], self._parent_pipe = os.pipe()
                passed_on.callback(os.close, inherited["--parent-pipe-fd"])
                kept.callback(os.close, self._parent_pipe)
            self.pid = self._spawn(inherited)
            kept.pop_all()
        self._ready = ready
        _pass_on_lines(reports, self._say)
        ends.watch_child(self.pid, lambda: self._collect(on_end))

    async def ready(self) -> int:
        """Wait until it listens; its port. Raises NotListening when it does not."""
        try:
            told = await asyncio.wait_for(_read_to_end(self._ready), READY_TIMEOUT)
        except TimeoutError:
            self.signal(9)
            raise NotListening(f"it did not listen within {READY_TIMEOUT:g} s and was killed") from None
        finally:
            os.close(self._ready)
        return _port_in(told, self._listen)

    def end(self) -> None:
        """End a master that is `bound`, as the end of this process would."""
        if self._parent_pipe >= 0:
            os.close(self._parent_pipe)
            self._parent_pipe = -1

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        # Until it has been collected the number is still its own.
        if not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _collect(self, on_end: Callable[[], None]) -> None:
        self._ended = True
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self.end()
        on_end()

    def _spawn(self, inherited: dict[str, int]) -> int:
        command = [sys.executable, "-m", "dlrover_run.master", "--listen", self._listen]
        if self._idle_timeout is not None:
            command += ["--idle-timeout", f"{self._idle_timeout:g}"]
        for flag, fd in inherited.items():
            command += [flag, str(fd)]
        if self._spec.state_dir is not None:
            command += ["--state-dir", os.path.abspath(self._spec.state_dir)]
        if self._spec.tls is not None:
            files = {"--tls-ca": self._spec.tls.ca, "--tls-cert": self._spec.tls.cert, "--tls-key": self._spec.tls.key}
            for flag, path in files.items():
                command += [flag, os.path.abspath(path)] if path else []
        if self._spec.auth_required:
            command += ["--auth-required"]
        with signals.held_back():
            process = subprocess.Popen(
                command,
                env=_environment(),
                # It keeps no file system busy, and nobody who reads our output waits for its end.
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=list(inherited.values()),
                # A session of its own is half of what tells our sweeps that this is a master (see `process_tree.tree`).
                start_new_session=True,
            )
        # It is collected through a pidfd; with a return code set, Popen does not warn that it is still running.
        process.returncode = 0
        return process.pid


def _environment() -> dict[str, str]:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("DLROVER_RDZV_TOKEN")}
    # From its own working directory it would not find a package that only ours leads to.
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), root)))
    environment["PYTHONSAFEPATH"] = "1"
    return environment


def _pass_on_lines(fd: int, say: Say) -> None:
    """Say each line that a master reports, until it has ended. It has no other console than this node's."""
    loop = asyncio.get_running_loop()
    os.set_blocking(fd, False)
    partial = b""

    def readable() -> None:
        nonlocal partial
        with contextlib.suppress(BlockingIOError):
            data = os.read(fd, MAX_REPORT)
            *lines, partial = (partial + data).split(b"\n")
            if len(partial) > MAX_REPORT or not data:
                lines, partial = [*lines, partial], b""
            for line in filter(None, lines):
                say(line.decode(errors="replace"))
            if not data:
                loop.remove_reader(fd)
                os.close(fd)

    loop.add_reader(fd, readable)


async def _read_to_end(fd: int) -> bytes:
    loop = asyncio.get_running_loop()
    whole: asyncio.Future[bytes] = loop.create_future()
    data = bytearray()

    def readable() -> None:
        part = os.read(fd, 4096)
        data.extend(part)
        if (not part or len(data) > MAX_READY) and not whole.done():
            whole.set_result(bytes(data))

    loop.add_reader(fd, readable)
    try:
        return await whole
    finally:
        loop.remove_reader(fd)


def _port_in(told: bytes, listen: str) -> int:
    """The port that a master tells of at its start. Raises NotListening for anything else that it says."""
    with contextlib.suppress(ValueError):
        answer = json.loads(told)
        if isinstance(answer, dict) and isinstance(answer.get("port"), int):
            return int(answer["port"])
        if isinstance(answer, dict) and "error" in answer:
            raise NotListening(str(answer["error"]).rstrip("."), answer.get("mistaken") is True)
    said_by = f"`{sys.executable} -m dlrover_run.master --listen {listen}` says why"
    raise NotListening(f"it ended before it listened; {said_by}")
