"""Runs the user's command that starts and ends nodes (`--scale-command`), whenever the coordinator assigns a run of it.

Which run, and that no two nodes run it for the same wanted size, is decided in `features/autoscale/command`. This
begins each run once, one at a time and the latest first, stops it at its time limit, and reports its end. A failure is
one line and an event: the job goes on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from dlrover_run.coordination.model import Assignment, NodeReport
from dlrover_run.coordination.parts import with_part
from dlrover_run.failures.causes import describe_exit_code
from dlrover_run.features.autoscale.command import CommandKey, CommandResult, CommandRun
from dlrover_run.features.autoscale.model import AutoscaleAssignment, AutoscaleNodeReport
from dlrover_run.features.events.records import Events, ScaleCommandEnded
from dlrover_run.processes.process import ManagedProcess, ProcessSpec, spawn
from dlrover_run.words.text import counted

FLAG = "--scale-command"

PLACEHOLDER = "{nodes}"
"""What stands in the command for the number of nodes."""

NODES_VARIABLE = "DLROVER_WANTED_NODES"
"""The variable of the command with the number of nodes that the job should have in all."""

JOB_VARIABLE = "DLROVER_JOB"
"""The variable of the command with the name of the job (--rdzv-id)."""

STOP_GRACE = 2.0
"""Seconds from SIGTERM to SIGKILL for a command that is stopped."""

MAX_OUTPUT = 4096
"""Bytes of the end of the command's output that are kept."""

MAX_LINE = 200
"""Characters of its last line that are quoted."""


class ScaleCommand:
    """To be used in the thread of a running loop. `command` are the words of the command, empty if this node has none,
    and `environment` is what it gets besides its own variables. `log` prints a line, `wake` has a report built, and
    `on_end` is called with the pid of a command that has ended. `close` it in any case."""

    def __init__(
        self,
        command: Sequence[str],
        job: str,
        environment: Mapping[str, str],
        log: Callable[[str], None],
        wake: Callable[[], None],
        on_end: Callable[[int], None],
        events: Events,
    ) -> None:
        self._command = command
        self._job = job
        self._environment = environment
        self._log = log
        self._wake = wake
        self._on_end = on_end
        self._events = events
        self._wanted: CommandRun | None = None
        self._begun: CommandKey | None = None
        self._current: _RunningCommand | None = None
        self._result: CommandResult | None = None

    @property
    def pids(self) -> set[int]:
        """The pid of the command while it runs."""
        return set() if self._current is None else {self._current.pid}

    def follow(self, assignment: Assignment, ends: bool) -> None:
        """Take the latest assignment; with `ends` no run begins any more. Idempotent."""
        part = AutoscaleAssignment.find(assignment.parts)
        self._wanted = None if part is None or ends else part.command
        self._begin()

    def add_to_report(self, report: NodeReport) -> NodeReport:
        """The report with the result of the last run that has ended."""
        if self._result is None:
            return report
        part = replace(AutoscaleNodeReport.get(report.parts), command=self._result)
        return replace(report, parts=with_part(report.parts, part))

    async def close(self) -> None:
        """Stop the command, and return when it has ended. Idempotent."""
        self._wanted = None
        if self._current is not None:
            await self._current.stop()

    def _begin(self) -> None:
        run = self._wanted
        if run is None or run.key == self._begun or self._current is not None:
            return
        self._begun = run.key
        if not self._command:
            self._finish(run, None, 0.0, f"this node has no {FLAG}: give it to all nodes")
            return
        argv = tuple(word.replace(PLACEHOLDER, str(run.nodes)) for word in self._command)
        environment = {**self._environment, NODES_VARIABLE: str(run.nodes), JOB_VARIABLE: self._job}
        try:
            self._current = _RunningCommand(argv, environment, run, self._note_end)
        except OSError as error:
            self._finish(run, None, 0.0, f"it cannot be started: {error.strerror or error}")

    def _note_end(self, ended: _RunningCommand) -> None:
        self._current = None
        self._on_end(ended.pid)
        self._finish(ended.run, ended.code, ended.seconds, ended.problem)
        # The wanted size may have changed meanwhile.
        self._begin()

    def _finish(self, run: CommandRun, code: int | None, seconds: float, problem: str) -> None:
        nodes = counted(run.nodes, "node")
        if problem:
            self._log(f"warning: {FLAG} for {nodes} has failed, and the job goes on with what it has: {problem}")
        else:
            self._log(f"{FLAG} has requested {nodes}")
        self._events.emit(ScaleCommandEnded(nodes=run.nodes, code=code, seconds=round(seconds, 3), what=problem))
        self._result = CommandResult(run.key, failed=bool(problem))
        self._wake()


class _RunningCommand:
    """One run, which has begun. `on_end` is called once, when it has ended. Raises OSError if it cannot be started."""

    def __init__(
        self,
        argv: tuple[str, ...],
        environment: Mapping[str, str],
        run: CommandRun,
        on_end: Callable[[_RunningCommand], None],
    ) -> None:
        self.run = run
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._began = time.monotonic()
        self.seconds = 0.0
        self._output = b""
        self._is_late = False
        self._changed = asyncio.Event()
        self._reading, writing = os.pipe()
        os.set_blocking(self._reading, False)
        spec = ProcessSpec(
            name=FLAG,
            argv=argv,
            environment=environment,
            stdio=(subprocess.DEVNULL, writing, writing),
            # A script of a shell is stopped together with the program that it has started.
            signal_group=True,
        )
        try:
            self.pid = spawn(spec)
        except OSError:
            os.close(self._reading)
            raise
        finally:
            os.close(writing)
        self._loop.add_reader(self._reading, self._read)
        self._process = ManagedProcess(self.pid, spec, self._note_end, lambda _: self._changed.set())
        self._limit = self._loop.call_later(run.seconds, self._on_limit)

    @property
    def code(self) -> int | None:
        return self._process.code

    @property
    def problem(self) -> str:
        """A clause, empty if the command has succeeded."""
        if self._is_late:
            problem = f"it did not end within {self.run.seconds:g} s, and was stopped"
        elif self._process.stopped_with is not None:
            problem = "it was stopped with this node"
        elif self.code:
            problem = f"it {describe_exit_code(self.code)}"
        else:
            return ""
        lines = self._output.decode(errors="replace").splitlines()
        last = next((" ".join(line.split()) for line in reversed(lines) if line.strip()), "")
        return f"{problem}: {last[:MAX_LINE]}" if last else problem

    async def stop(self) -> None:
        """End it, and return when it has ended, or when the kernel does not end it."""
        self._process.stop(signal.SIGTERM, STOP_GRACE)
        while self._process.live and not self._process.stuck:
            self._changed.clear()
            await self._changed.wait()

    def _on_limit(self) -> None:
        self._is_late = True
        self._process.stop(signal.SIGTERM, STOP_GRACE)

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
