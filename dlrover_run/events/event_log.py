"""The event log of this agent: where it is, and the events that follow from the coordinator's assignments."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from dlrover_run.agent.host import display_name, launcher_pid
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.parts import PROGRAM
from dlrover_run.coordination.records.plan import OVER, PlanPhase
from dlrover_run.events import state_directory
from dlrover_run.events.records import (
    FILE_NAME,
    NO_EVENTS,
    SCHEMA,
    CoordinatorChanged,
    Event,
    Events,
    JobEnded,
    LogOpened,
    NodeWaiting,
    RoundClosed,
    RoundFormed,
)
from dlrover_run.events.state_directory import file_name
from dlrover_run.events.writer import EventFile, EventWriter
from dlrover_run.output.run_directory import RunDir
from dlrover_run.processes import tree
from dlrover_run.spec import JobSpec
from dlrover_run.words.reasons import codes

MAX_SCRIPT = 200
"""Characters of the name of a script."""

TASK_STAGES = ("store", "step")
"""The stages of a task of `tf-ps-run`: it is ready, and it has made a step or serves others."""


def open_event_log(job: JobSpec, run_dir: RunDir, program: str, warn: Callable[[str], None]) -> Events:
    """The event log of this agent, which is written from the first event on. `warn` is called from another
    thread."""
    path = event_log_path(job, run_dir)
    if path is None:
        return NO_EVENTS
    kept = _kept_path(job)
    if kept is not None and path == kept:
        prepare = partial(state_directory.prepare, kept.parent)
        file = EventFile(path, log_opened(job, program), state_directory.MAX_BYTES, 1, prepare, private=True)
        # The user has not asked for it, so there is no line about it, and no end that waits long for it.
        return EventWriter(file, lambda sentence: None, close_timeout=state_directory.CLOSE_TIMEOUT)
    note = (lambda: None) if kept is None else partial(_note_place, kept, path)
    return EventWriter(EventFile(path, log_opened(job, program), prepare=note), warn)


def _note_place(kept: Path, path: Path) -> None:
    with contextlib.suppress(OSError):
        state_directory.prepare(kept.parent, kept.name, path)


def _kept_path(job: JobSpec) -> Path | None:
    """The log that an agent keeps without a flag."""
    directory = state_directory.state_directory(os.environ)
    return None if directory is None else directory / file_name(job.display_name, display_name(job), os.getpid())


def log_opened(job: JobSpec, program: str = PROGRAM) -> LogOpened:
    """The first line of the log of this agent."""
    now = time.monotonic()
    # The launcher had read the command line before it forked this process.
    began = tree.start_of(os.getppid())
    return LogOpened(
        time=datetime.now(UTC),
        mono=round(now, 6),
        schema=SCHEMA,
        job=job.display_name,
        host=display_name(job),
        node_id=job.node_id or str(os.getpid()),
        pid=os.getpid(),
        workers=0 if job.rules.engine else job.workers_per_node,
        began=round(now if began is None else began, 6),
        program=program,
        launcher=launcher_pid(job),
        script=os.path.basename(job.entrypoint.target)[:MAX_SCRIPT],
        stages=TASK_STAGES if job.rules.engine else (),
    )


def event_log_path(job: JobSpec, run_dir: RunDir) -> Path | None:
    """The file of this agent: in the directory of `--journal`, which agents may share, or in the directory of the run,
    if the user has named a log directory, else in the state directory of the user. None, as with /dev/null: no log is
    kept."""
    if job.journal == os.devnull:
        return None
    if job.journal is not None:
        return Path(job.journal, file_name(job.display_name, display_name(job), os.getpid()))
    if job.logs.log_dir and run_dir.keep and run_dir.path is not None:
        return Path(run_dir.path, FILE_NAME)
    return _kept_path(job)


class AssignmentEvents:
    """Emits what each assignment of this node changes. `before_end` is called before the end of a round."""

    def __init__(self, events: Events, before_end: Callable[[], None] = lambda: None) -> None:
        self._events = events
        self._before_end = before_end
        self._known = Assignment()

    def follow(self, assignment: Assignment) -> None:
        """Take the latest assignment; the same one may come again."""
        before, self._known = self._known, assignment
        found = changes(before, assignment)
        if any(isinstance(event, RoundClosed) for event in found):
            self._before_end()
        for event in found:
            self._events.emit(event)


def changes(before: Assignment, after: Assignment) -> list[Event]:
    """The events between two assignments of one node. Pure.

    A node that waits writes another event when the codes of what it waits for change, not when figures in it do.
    """
    found: list[Event] = []
    if before.epoch and after.epoch != before.epoch:
        found.append(CoordinatorChanged(epoch=after.epoch, before=before.epoch))
    if after.phase in OVER and before.phase not in OVER:
        # Before the end of its last round, which no other one follows.
        found.append(JobEnded(phase=after.phase.value, restarts=after.restart_count, reasons=after.reasons))
    ranks, last = after.ranks, before.ranks
    if last is not None and (ranks is None or ranks.key != last.key):
        found.append(
            RoundClosed(
                round=last.round,
                epoch=last.key.epoch,
                reasons=after.reasons,
                failed=after.restart_count > before.restart_count or after.phase is PlanPhase.FAILED,
            )
        )
    if ranks is not None and (last is None or ranks.key != last.key):
        failure = after.failure
        found.append(
            RoundFormed(
                round=ranks.round,
                epoch=ranks.key.epoch,
                node=ranks.node_rank,
                nodes=ranks.nodes,
                first_rank=ranks.first_rank,
                workers=ranks.workers,
                world_size=ranks.world_size,
                restarts=ranks.restart_count,
                reasons=after.reasons,
                failed_rank=failure.rank if failure else None,
                failed_node=failure.node if failure else "",
                failed_what=failure.exit_text if failure else "",
            )
        )
    if after.waiting is not None and (
        before.waiting is None or codes(before.waiting.reasons) != codes(after.waiting.reasons)
    ):
        found.append(NodeWaiting(reasons=after.waiting.reasons, seconds=after.waiting.seconds))
    return found
