"""Runs the user's command that starts and ends nodes (`--scale-command`), whenever the coordinator assigns a run of it.

Which run, and that no two nodes run it for the same wanted size, is decided in `features/autoscale/command`. This
begins each run once, one at a time and the latest first, stops it at its time limit, and reports its end. A failure is
one line and an event: the job goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.events.records import Events, ScaleCommandEnded
from dlrover_run.features.autoscale.command import CommandKey, CommandResult, CommandRun
from dlrover_run.features.autoscale.model import AutoscaleAssignment, AutoscaleNodeReport
from dlrover_run.processes.user_command import UserCommand
from dlrover_run.words.text import counted

FLAG = "--scale-command"

PLACEHOLDER = "{nodes}"
"""What stands in the command for the number of nodes."""

NODES_VARIABLE = "DLROVER_WANTED_NODES"
"""The variable of the command with the number of nodes that the job should have in all."""

JOB_VARIABLE = "DLROVER_JOB"
"""The variable of the command with the name of the job (--rdzv-id)."""


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
        self._current: UserCommand | None = None
        self._result: CommandResult | None = None

    @property
    def pids(self) -> set[int]:
        """The pid of the command while it runs."""
        return set() if self._current is None else {self._current.pid}

    def follow(self, assignment: Assignment, shutting_down: bool) -> None:
        """Take the latest assignment; with `shutting_down` no run begins any more. Idempotent."""
        part = AutoscaleAssignment.find(assignment.parts)
        self._wanted = None if part is None or shutting_down else part.command
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
            self._current.stop()
            await self._current.ended()

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
            self._current = UserCommand(FLAG, argv, environment, run.seconds, partial(self._note_end, run))
        except OSError as error:
            self._finish(run, None, 0.0, f"it cannot be started: {error.strerror or error}")

    def _note_end(self, run: CommandRun, ended: UserCommand) -> None:
        self._current = None
        self._on_end(ended.pid)
        self._finish(run, ended.code, ended.seconds, ended.problem)
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
