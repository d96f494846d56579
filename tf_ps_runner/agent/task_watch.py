"""Watches the TensorFlow tasks of this node for stalls, and carries out `--stall-action`. Imported only with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

from dlrover_run.agent.framework import AgentServices
from dlrover_run.coordination.records.activity import WAITS
from dlrover_run.features.hangs.node.diagnosis import LocalDiagnosis, Quiet
from dlrover_run.features.hangs.node.stall_report import StallReport, show_stacks
from dlrover_run.features.hangs.node.stall_watch import Sources, StallWatch
from dlrover_run.features.hangs.node.watch_health import WatchHealth
from dlrover_run.features.hangs.search.detector import Resumed
from dlrover_run.features.hangs.search.guilt import Finding
from dlrover_run.features.hangs.search.outside import LearnedPauses
from dlrover_run.features.hangs.settings import HangSettings
from dlrover_run.observe.sample import Sampler
from dlrover_run.observe.tick import Consumer
from dlrover_run.spec import JobSpec
from dlrover_run.stacks.read import RoundStacks
from dlrover_run.words.reasons import render
from dlrover_run.words.text import join_words
from tf_ps_runner.agent.task_events import TaskEvents
from tf_ps_runner.agent.task_process import TaskProcess
from tf_ps_runner.agent.task_stalls import TaskDetectors, find_task_stall, locate
from tf_ps_runner.cluster.orders import NodeOrder
from tf_ps_runner.cluster.rules import ROLES


class _Mark(NamedTuple):
    """What a task that makes no progress is marked with."""

    guilty: bool
    report: StallReport

    @property
    def code(self) -> str:
        codes = [reason.code for reason in self.report.reasons]
        return codes[0] if self.guilty and codes else WAITS


class TaskWatch:
    """The watch over all tasks of a node: `start` and `end` each process. `kill` ends a task that makes no progress,
    with a clause that says why. While no task runs, there is no timer."""

    def __init__(
        self,
        job: JobSpec,
        services: AgentServices,
        events: TaskEvents,
        kill: Callable[[TaskProcess, str], None],
    ) -> None:
        self._services = services
        self._events = events
        self._kill = kill
        self._numbers = itertools.count()
        self._tasks: dict[int, TaskProcess] = {}
        self._order = NodeOrder(version=0)
        self._settings = job.settings_of("hangs", HangSettings)
        self._detectors = TaskDetectors(self._settings.timeout)
        self._pauses = LearnedPauses()
        self._health = WatchHealth(self._settings.action, services.console, services.events, services.wake)
        self._sampler: Sampler | None = None
        self._watch: StallWatch | None = None
        self._consumer: Consumer | None = None
        # By the task whose detector has found each stall.
        self._reports: dict[int, StallReport] = {}

    @property
    def stalled(self) -> Mapping[str, str]:
        """The tasks that make no progress by name, each with a code of the reason."""
        return {str(self._tasks[number].key): mark.code for number, mark in self._marks().items()}

    @property
    def problem(self) -> str:
        """Why tasks that hang cannot be found; empty if they can."""
        return self._health.problem

    def follow(self, order: NodeOrder) -> None:
        """Take the order: tasks that are to leave, or to end with their chief, are not stalled."""
        self._order = order

    def start(self, task: TaskProcess) -> None:
        """The process of a task runs."""
        if task.process is None:
            return
        if self._sampler is None:
            self._sampler = Sampler({}, store_port=0)
            self._watch = watch = self._new_watch(self._sampler)
            self._consumer = self._services.tick.add("hangs", lambda sample: watch.take())
        number = next(self._numbers)
        self._tasks[number] = task
        self._sampler.watch(number, task.process.pid)

    def end(self, task: TaskProcess) -> None:
        """The process of a task has ended."""
        for number in [number for number, one in self._tasks.items() if one is task]:
            del self._tasks[number]
            self._detectors.forget(number)
            if self._sampler is not None:
                self._sampler.forget(number)
            self._change({one: report for one, report in self._reports.items() if one != number})
        if not self._tasks:
            self.close()

    def close(self) -> None:
        """End the watch. Idempotent."""
        if self._consumer is not None and self._watch is not None:
            self._consumer.close()
            self._watch.close()
        self._consumer = self._watch = self._sampler = None

    def _pids(self) -> Mapping[int, int]:
        """The processes of the tasks that run."""
        return {number: task.process.pid for number, task in self._tasks.items() if task.process is not None}

    def _new_watch(self, sampler: Sampler) -> StallWatch:
        sources = Sources(sampler, RoundStacks(self._pids, self._health.note_denied), self._steps)
        diagnosis = LocalDiagnosis(
            self._detectors, self._on_stall, self._on_resume, self._pauses, self._find, self._names
        )
        return StallWatch(self._detectors, sources, diagnosis, self._pauses, health=self._health)

    def _steps(self) -> Mapping[int, int]:
        """The last step of each task that has made one."""
        return {
            number: task.step
            for number, task in self._tasks.items()
            if ROLES[task.key.role].uses_servers and task.progress is not None
        }

    def _names(self, numbers: tuple[int, ...]) -> str:
        return join_words([str(self._tasks[number].key) for number in numbers if number in self._tasks])

    def _find(self, quiet: Quiet) -> Finding | None:
        (number,) = quiet.stalled.ranks
        here = {one.rank: one for one in quiet.suspects if one.rank in self._tasks}
        leaves = self._order.ending or self._order.pause or self._services.shutdown.requested
        if leaves or number not in here or self._is_leaving(number):
            return None
        return find_task_stall(
            number,
            here,
            {each: self._tasks[each].key.role for each in here},
            locate(quiet.stacks.get(number)),
            others_progress=self._detectors.others_progress(number),
            is_learned=self._settings.timeout is None,
        )

    def _is_leaving(self, number: int) -> bool:
        return self._tasks[number].stopping is not None or self._tasks[number].leaving

    def _on_stall(self, report: StallReport) -> None:
        (number,) = report.stalled.ranks
        is_known = any(one.guilty == report.guilty for one in self._reports.values())
        self._change({**self._reports, number: report})
        if not is_known:
            self._services.console.info(report.line)
            if self._settings.action in ("dump", "restart"):
                show_stacks(report, f"version {self._order.version}", self._services.run_dir, self._services.console)
        if self._settings.action == "restart":
            for guilty in report.guilty:
                if guilty in self._tasks and not self._is_leaving(guilty):
                    task = self._tasks[guilty]
                    self._services.console.info(f"{task.key} is killed (--stall-action=restart)")
                    self._kill(task, f"makes no progress: it {render(report.reasons)}")

    def _on_resume(self, resumed: Resumed) -> None:
        (number,) = resumed.ranks
        if number not in self._reports:
            return
        self._change({one: report for one, report in self._reports.items() if one != number})
        if number in self._tasks:
            name = self._tasks[number].key
            self._services.console.info(f"{name} makes progress again, after {resumed.seconds:.0f} s")

    def _marks(self) -> dict[int, _Mark]:
        """The tasks that make no progress: those that were found, and those that are the cause."""
        marks = {number: _Mark(number in report.guilty, report) for number, report in self._reports.items()}
        for report in self._reports.values():
            marks.update({number: _Mark(True, report) for number in report.guilty})
        return {number: mark for number, mark in sorted(marks.items()) if number in self._tasks}

    def _change(self, reports: dict[int, StallReport]) -> None:
        """Continue with these reports, and emit what has changed."""
        before = self._marks()
        self._reports = reports
        after = self._marks()
        for number in sorted(before.keys() - after.keys()):
            if number in self._tasks:
                self._events.resumed(self._tasks[number].assigned)
        for number, mark in after.items():
            if number not in before or before[number].guilty != mark.guilty:
                report = mark.report
                self._events.stalled(
                    self._tasks[number].assigned, report.stalled.since, report.reasons, guilty=mark.guilty
                )
        if before != after:
            self._services.wake()
