"""The jobs of this user that have ended here, by the event logs in the state directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from dlrover_run.events.reader import AgentLog, merged, read_head, read_log, runs_of
from dlrover_run.events.records import FILE_NAME, AgentEnded, JobEnded, RoundFormed
from dlrover_run.events.state_directory import name_prefix, state_directory
from dlrover_run.words.reasons import Code

RECENT = 24 * 3600.0
"""Seconds for which a job that has ended can be meant by a command without a word while others run."""

_AGENT = "-agent"
"""How the names of the processes of agents end."""


class EndedJob(NamedTuple):
    """A job that has ended, by the logs of its agents here. `state` is a word for a person:
    it has succeeded, has failed, or was stopped; or there is no end, as its agents were killed, or run where their
    processes are not seen from here. `nodes` and `workers` are those of its
    last round, 0 if it had none. `seconds` passed from its begin to `ended`."""

    logs: list[AgentLog]
    state: str
    nodes: int
    workers: int
    seconds: float
    ended: datetime

    @property
    def name(self) -> str:
        return self.logs[0].opened.job

    @property
    def is_recent(self) -> bool:
        return (datetime.now(UTC) - self.ended).total_seconds() < RECENT


def ended_job(logs: list[AgentLog]) -> EndedJob:
    """What the logs of a run that is over show of it. Pure."""
    events = [entry.event for entry in merged(logs)]
    formed = next((event for event in reversed(events) if isinstance(event, RoundFormed)), None)
    began = min(log.opened.time for log in logs)
    ended = max(log.last.time for log in logs)
    return EndedJob(
        logs,
        _state(logs, next((event for event in reversed(events) if isinstance(event, JobEnded)), None)),
        0 if formed is None else formed.nodes,
        0 if formed is None else formed.world_size,
        (ended - began).total_seconds(),
        ended,
    )


def _state(logs: Sequence[AgentLog], end: JobEnded | None) -> str:
    if end is not None:
        if Code.STOPPED_ON_REQUEST.within(end.reasons):
            return "stopped"
        return "failed" if end.phase == "failed" else "succeeded"
    ends = [event for log in logs if isinstance(event := log.last, AgentEnded)]
    if len(ends) < len(logs):
        return "no end"
    return "stopped" if any(event.exit_code for event in ends) else "succeeded"


class EndedJobs:
    """The jobs of this user that have ended, as far as `directory`, by default the state directory, has their logs."""

    def __init__(self, directory: Path | None = None) -> None:
        directory = directory or state_directory(os.environ)
        files = []
        # There may be no such directory, and another agent may remove a file of it.
        with contextlib.suppress(OSError):
            for path in () if directory is None else directory.iterdir():
                if path.name.endswith(f".{FILE_NAME}"):
                    with contextlib.suppress(OSError):
                        files.append((path.stat().st_mtime, path))
        self._paths = [path for _, path in sorted(files, reverse=True)]
        """The logs, the one that was written last first."""
        self._read: dict[Path, AgentLog | None] = {}

    def __iter__(self) -> Iterator[EndedJob]:
        """All of them, the one that ended last first."""
        return self._of(lambda path: True)

    def names(self, beginning: str) -> Iterator[str]:
        """The names that begin so, each once, the log that was written last first. Only first lines are read, as
        the shell waits for the names; so jobs that run are among them."""
        seen = set()
        for path in self._paths:
            head = read_head(path) if path.name.startswith(name_prefix(beginning)[:-1]) else None
            if head is not None and head.job.startswith(beginning) and head.job not in seen:
                seen.add(head.job)
                yield head.job

    def find(self, word: str | None) -> EndedJob | None:
        """The last one, or the last one that a word means: by its name in full, else by the pid of a launcher or an
        agent, else by the beginning of its name."""
        if word is None:
            return next(iter(self), None)
        prefix = name_prefix(word)
        named = self._of(lambda path: path.name.startswith(prefix), lambda name: name == word)
        if found := next(named, None):
            return found
        if word.isdecimal() and (found := next(self._of(lambda path: _is_by_pid(path, word)), None)):
            return found
        return next(self._of(lambda path: path.name.startswith(prefix[:-1]), lambda name: name.startswith(word)), None)

    def _of(
        self, wanted: Callable[[Path], bool], named: Callable[[str], bool] = lambda name: True
    ) -> Iterator[EndedJob]:
        """The jobs with a log at a path that is wanted, and with such a name."""
        seen: set[Path] = set()
        for path in self._paths:
            if path in seen or not wanted(path):
                continue
            log = self._log(path)
            if log is None or not named(log.opened.job):
                continue
            beside = [other for other in self._paths if other.name.startswith(name_prefix(log.opened.job))]
            by_path = {other: found for other in beside if (found := self._log(other)) is not None}
            same = [found for found in by_path.values() if found.opened.job == log.opened.job]
            run = next(run for run in runs_of(same) if any(log is other for other in run))
            seen.update(other for other, found in by_path.items() if any(found is each for each in run))
            if not any(_runs(each) for each in run):
                yield ended_job(run)

    def _log(self, path: Path) -> AgentLog | None:
        if path not in self._read:
            self._read[path] = read_log(path)
        return self._read[path]


def _is_by_pid(path: Path, word: str) -> bool:
    """Whether a log is of the agent or of the launcher with this pid."""
    if path.name.endswith(f".{word}.{FILE_NAME}"):
        return True
    head = read_head(path)
    return head is not None and str(head.launcher) == word


def _runs(log: AgentLog) -> bool:
    """Whether the agent of a log still runs here: it has written no end, and its pid is that of an agent."""
    if log.ended is not None:
        return False
    try:
        return Path(f"/proc/{log.opened.pid}/comm").read_text().rstrip("\n").endswith(_AGENT)
    except OSError:
        return False
