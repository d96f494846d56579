"""What a node does for `--reload`: looks at the files, reports what was saved, and shows what a job waits for."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from typing import Any

from msgspec.structs import replace

from dlrover_run.agent.framework import AgentServices, FrameworkAdapter
from dlrover_run.agent.result import JobResult
from dlrover_run.background import Background, wait_for_event
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import RankAssignment
from dlrover_run.features.reload.changes import Action, Files, Verdict, Watched, decide
from dlrover_run.features.reload.files import forget_bytecode, git_writes, python_files, shown, snapshot, syntax_problem
from dlrover_run.features.reload.keys import Keys
from dlrover_run.features.reload.model import ReloadReport, held_by
from dlrover_run.features.reload.settings import ReloadSettings
from dlrover_run.features.reload.text import ReloadCode
from dlrover_run.features.reload.watcher import Watcher
from dlrover_run.words.log_level import internal_error, log_frames
from dlrover_run.words.reasons import Reason, shown_names
from dlrover_run.words.text import join_names
from dlrover_run.workers.feature import WorkersFeature
from dlrover_run.workers.round import WorkerRound
from dlrover_run.workers.specs import Worker

ASK_AFTER = (0.2, 0.6, 1.5, 4.0, 12.0)
"""Seconds after the start of the workers at which the node looks what they have imported; most modules come first."""

ASK_INTERVAL = 30.0
"""Seconds between two later looks: for what a worker imports in a function."""

POLL_INTERVAL = 0.1
"""Seconds between two looks at the user's files where nothing tells that something has changed."""

KEPT_POLL_INTERVAL = 2.0
"""The same for installed modules, of which there are thousands."""

KEYS = "r and Enter: at once; q and Enter: the end"


class Reload(WorkersFeature):
    """The files of this node. One task asks for their names, looks at them, and reports what follows."""

    def __init__(self, services: AgentServices, tasks: FrameworkAdapter[Any]) -> None:
        super().__init__(services, tasks)
        settings = services.job.settings_of("reload", ReloadSettings)
        self._directories = settings.directories
        self._background = Background(self._note_error)
        self._watcher = Watcher(self._note_events)
        self._keys = Keys(self._take_line)
        self._news = asyncio.Event()
        self._paths: set[str] = set(self._program())
        self._kept: set[str] = set()
        self._started = self._template_started = time.time_ns()
        self._watched = Watched().add(snapshot(self._paths), {}, self._started, self._template_started)
        self._ask_times: list[float] = []
        self._look_at: float | None = None
        self._kept_at: float | None = None
        self._renews = False
        self._held: tuple[Reason, ...] = ()
        self._report = ReloadReport()

    def open(self) -> None:
        self._tasks.starter.watches_files = True
        self._schedule()
        self._background.start(self._follow_files())

    def follow(self, assignment: Assignment, shutting_down: bool) -> None:
        if shutting_down:
            self._background.cancel()
            self._watcher.close()
            self._keys.end()
            return
        held = held_by(assignment.reasons) if assignment.phase is PlanPhase.GATHERING else ()
        if held == self._held:
            return
        self._held = held
        if not held:
            self._keys.end()
            return
        self._show_end(assignment)
        # Its workers have ended, so the terminal is free.
        if self._keys.begin():
            self._services.console.info(KEYS)

    def add_to_report(self, report: NodeReport) -> NodeReport:
        return replace(report, parts=with_part(report.parts, self._report))

    async def before_round(self, ranks: RankAssignment, is_wanted: Callable[[], bool]) -> None:
        if self._renews or snapshot(self._kept) != {path: self._watched.base.kept.get(path) for path in self._kept}:
            self._services.console.info("installed modules have changed: the workers start from a new template")
            await self._tasks.starter.renew()
            self._renews = False
            self._kept.clear()
            self._template_started = time.time_ns()
            self._watched = self._watched.forget_kept()

    def round_begins(self, workers: WorkerRound) -> None:
        self._started = time.time_ns()
        self._watched = self._watched.begin(snapshot(self._paths))
        self._schedule()

    def worker_ended(self, worker: Worker) -> None:
        # It may have ended before it was asked for the first time.
        self._ask_times.append(0.0)
        self._news.set()

    async def close(self, result: JobResult) -> None:
        self._watcher.close()
        self._keys.end()
        await self._background.close()

    async def _follow_files(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await wait_for_event(self._news, self._pause(loop.time()))
            self._news.clear()
            if self._ask_times and min(self._ask_times) <= loop.time():
                await self._ask()
            self._look(loop.time())

    def _pause(self, now: float) -> float | None:
        """Seconds until the next look."""
        times = [*self._ask_times, now + (ASK_INTERVAL if self._watcher.works else POLL_INTERVAL)]
        if self._look_at is not None:
            times.append(self._look_at)
        return max(0.0, min(times) - now)

    def _schedule(self) -> None:
        now = asyncio.get_running_loop().time()
        self._ask_times = [now + seconds for seconds in ASK_AFTER]
        self._news.set()

    async def _ask(self) -> None:
        """Find out which files the workers and the template have imported, and watch their directories."""
        now = asyncio.get_running_loop().time()
        self._ask_times = [at for at in self._ask_times if at > now] or [now + ASK_INTERVAL]
        found = await self._tasks.starter.files()
        own = {*self._program(), *python_files(self._directories)}
        if found is not None:
            own |= {*found.own, *found.missing}
        elif not self._tasks.starter.forks:
            # What a spawned worker imports is not known.
            own.update(python_files([os.path.dirname(path) for path in self._program()] or [os.getcwd()], deep=False))
        new, kept = own - self._paths, set(() if found is None else found.kept) - self._kept
        self._paths |= new
        self._kept |= kept
        if new or kept:
            self._watched = self._watched.add(snapshot(new), snapshot(kept), self._started, self._template_started)
        directories = {os.path.dirname(path) for path in (*self._paths, *self._kept)}
        self._watcher.watch(frozenset(path for path in (*directories, *self._directories) if os.path.isdir(path)))

    def _note_events(self, paths: Collection[str]) -> None:
        now = asyncio.get_running_loop().time()
        if not self._kept.isdisjoint(paths) or not paths:
            self._kept_at = now
        if any(path.endswith(".py") and path not in self._paths and path not in self._kept for path in paths):
            # A worker may have imported it meanwhile.
            self._ask_times.append(now)
        self._news.set()

    def _look(self, now: float) -> None:
        kept = self._watched.last.kept
        if self._kept_at is not None and now >= self._kept_at:
            kept = snapshot(self._kept)
            self._kept_at = None
        if self._kept_at is None and not self._watcher.works:
            self._kept_at = now + KEPT_POLL_INTERVAL
        self._watched, verdict = decide(
            self._watched, Files(snapshot(self._paths), kept), now, lambda paths: git_writes(paths, time.time())
        )
        self._look_at = verdict.at
        if verdict.action is Action.WAIT and kept != self._watched.base.kept:
            # They may change without a further event that names one of them.
            self._kept_at = verdict.at
        self._act(verdict)

    def _act(self, verdict: Verdict) -> None:
        console = self._services.console
        then = "nothing starts until the next save" if self._held else "the workers go on until the next save"
        if verdict.deleted:
            gone = join_names([shown(path) for path in verdict.deleted])
            console.info(f"{gone} deleted" + (f": {then}" if verdict.action is Action.DELETED else ""))
        names = [shown(path) for path in verdict.names]
        if verdict.action is Action.NEW_TEMPLATE:
            self._renews = True
            self._request(ReloadCode.NEW_TEMPLATE(names=shown_names(names), number=len(names)))
        elif verdict.action is Action.RESTART:
            if problem := self._syntax_problem(verdict.names):
                console.error(f"{problem}; {then}")
            else:
                forget_bytecode(verdict.names)
                self._request(ReloadCode.SAVED(names=shown_names(names), number=len(names)))

    def _request(self, reason: Reason) -> None:
        self._report = ReloadReport(os.urandom(8).hex(), (reason,))
        self._services.wake()

    def _syntax_problem(self, paths: Collection[str]) -> str:
        """What is wrong with the first saved file, if the workers have the grammar of this interpreter."""
        python = self._services.job.entrypoint.python
        return syntax_problem(paths) if python == sys.executable else ""

    def _program(self) -> list[str]:
        """The file of the script, as far as it is known without a worker."""
        entrypoint = self._services.job.entrypoint
        if entrypoint.kind not in ("script", "run_path", "program"):
            return []
        path = os.path.abspath(entrypoint.target)
        return [os.path.join(path, "__main__.py") if os.path.isdir(path) else path]

    def _show_end(self, assignment: Assignment) -> None:
        """Print why the workers have ended, and what of that is not on the screen yet."""
        console = self._services.console
        failure = assignment.failure
        if failure is None:
            console.info(assignment.reason)
            return
        if failure.trace and self._services.job.logs.redirects.any():
            console.print(failure.trace)
        console.error(assignment.reason)

    def _take_line(self, line: str) -> None:
        if line == "r":
            self._request(ReloadCode.REQUESTED())
        elif line == "q":
            # As by Ctrl-C, which the watchdog gets too.
            os.kill(os.getppid(), signal.SIGINT)
        else:
            self._services.console.info(KEYS)

    def _note_error(self, error: Exception) -> None:
        console = self._services.console
        console.info(f"warning: --reload looks at no file any more: {internal_error(error)}")
        log_frames(console.info, error)


NODE = Reload
