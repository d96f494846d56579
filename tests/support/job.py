"""Real processes of one test: their output, all of their descendants, and waits for what they do.

This process is a subreaper while a test runs some, so every process that they start stays its descendant, and a test
can assert that none is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

import psutil

from dlrover_run.processes import tree
from support.harness import WAIT, is_agent, kill_leftovers, still_alive, watched

Captured = TypeVar("Captured", bound="CapturedProcess")


class CapturedProcess:
    """A process whose output is read and kept."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self.process = process
        self.output = ""
        self.at_end = False
        self._searched = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    def has_printed(self, words: str) -> bool:
        """Whether the output so far contains this text; line breaks count as spaces."""
        return words in " ".join(self.output.split())

    def search(self, pattern: str, since: int = 0, timeout: float = WAIT) -> re.Match[str]:
        """Wait for the first match of this pattern in the output after `since`, and return it."""
        deadline = time.monotonic() + timeout
        while (found := re.compile(pattern).search(self.output, since)) is None:
            if not self._listen(deadline):
                raise AssertionError(f"{self.name} did not print {pattern!r} but:\n{self.output}")
        return found

    def until(self, pattern: str, timeout: float = WAIT) -> re.Match[str]:
        """Wait for the next match of this pattern after those that were waited for before, and return it."""
        found = self.search(pattern, self._searched, timeout)
        self._searched = found.end()
        return found

    def until_prints(self, words: str, timeout: float = WAIT) -> None:
        """As `until`, for this text."""
        self.until(re.escape(words), timeout)

    def finish(self, timeout: float = WAIT) -> int:
        """Wait for the end of the process, and return its exit code."""
        deadline = time.monotonic() + timeout
        while self._listen(deadline):
            pass
        try:
            return self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {timeout} s, and printed:\n{self.output}") from None

    def catch_up(self) -> None:
        """Read the output that is available now, unless the pipe is closed."""
        assert self.process.stdout is not None
        while not self.process.stdout.closed and self._listen(0.0):
            pass

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def _listen(self, deadline: float) -> bool:
        """Read the next output. Return whether there was any before the deadline or the end."""
        return listen([self], deadline)

    def take(self) -> bool:
        """Read the available output. Return False at the end of the output."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 65536)
        self.output += data.decode(errors="replace")
        self.at_end = not data
        return bool(data)


def listen(sources: Sequence[CapturedProcess], deadline: float) -> bool:
    """Read the next output of any of these processes. Return whether there was any before the deadline or the end of
    all outputs."""
    while speaking := {one.process.stdout: one for one in sources if not one.at_end}:
        ready, _, _ = select.select(list(speaking), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        if any(speaking[console].take() for console in ready):
            return True
    return False


class Processes:
    """The processes below this one that did not exist before, but those of `others`."""

    _open: ClassVar[int] = 0

    def __init__(self, others: Callable[[], Collection[int]] = tuple) -> None:
        self.captured: list[CapturedProcess] = []
        self._before = {child.pid for child in psutil.Process().children(recursive=True)}
        self._others = others
        Processes._open += 1
        tree.become_subreaper()

    def add(self, process: Captured) -> Captured:
        """Add a process that the test has started: it has to end before `close`."""
        self.captured.append(process)
        return process

    def living(self) -> list[psutil.Process]:
        """Return those that run. Orphans that have ended are reaped."""
        captured = {process.pid for process in self.captured}
        others = self._before.union(self._others())
        living = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.pid in others:
                    continue
                if process.status() != psutil.STATUS_ZOMBIE:
                    living.append(process)
                elif process.ppid() == os.getpid() and process.pid not in captured:
                    os.waitpid(process.pid, 0)
        return living

    def wait(self) -> list[str]:
        """Wait until all have ended by themselves. Return those that have not, for the message of a failing test."""
        with watched_processes(self.living()) as pidfds:
            still_alive(pidfds, WAIT)
        return [_describe(process) for process in self.living()]

    def outputs(self) -> str:
        """Return the output so far of all processes that were added, for the message of a failing test."""
        for process in self.captured:
            process.catch_up()
        return "".join(f"\n--- {process.name}\n{process.output}" for process in self.captured)

    def close(self) -> None:
        """Fail unless those that were added have ended, and all others have ended by themselves."""
        unfinished = [captured.name for captured in self.captured if captured.process.poll() is None]
        left: list[str] = []
        try:
            if not unfinished:
                left = self.wait()
        finally:
            self.end()
        assert not unfinished, f"the test left {unfinished} running{self.outputs()}"
        assert not left, f"left behind: {left}{self.outputs()}"

    def end(self) -> None:
        """Kill those that still run."""
        # If the watchdog were killed first, the processes that it watches could start new ones.
        while processes := self.living():
            with watched_processes(processes) as pidfds:
                kill_leftovers(pidfds)
                still_alive(pidfds, WAIT)
        for captured in self.captured:
            captured.finish()
            assert captured.process.stdout is not None
            captured.process.stdout.close()
        Processes._open -= 1
        if not Processes._open:
            ctypes.CDLL(None).prctl(tree._PR_SET_CHILD_SUBREAPER, 0)


def kill_at_once(processes: Iterable[psutil.Process]) -> None:
    """Kill all of these processes, as in a power failure."""
    # The agents first, because they would have time for their last reports.
    for process in sorted(processes, key=lambda process: not is_agent(process)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def of_local_node(processes: Iterable[psutil.Process], number: int) -> list[psutil.Process]:
    """Return those of the processes that belong to a node of `--local-nodes`: its agent, its watchdog, and their
    descendants."""
    mark = f"DLROVER_LOCAL_NODE={number}".encode()
    found = []
    for process in processes:
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(process)
    return sorted(found, key=lambda process: not is_agent(process))


@contextlib.contextmanager
def watched_processes(processes: Sequence[psutil.Process]) -> Iterator[list[int]]:
    """As `harness.watched`, for the processes that have not ended in the meantime."""
    with contextlib.ExitStack() as stack:
        fds: list[int] = []
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                fds += stack.enter_context(watched(process.pid))
        yield fds


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return f"{process.pid} {process.name()} {process.cmdline()}"
    return f"{process.pid}, which has gone by now"
