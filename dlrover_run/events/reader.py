"""Reads event logs: of jobs that are over, that run, and of agents that were killed in the middle of a line."""

from __future__ import annotations

import contextlib
import heapq
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from dlrover_run.events.records import FILE_NAME, AgentEnded, AnyEvent, Event, JobEnded, LogOpened
from dlrover_run.events.state_directory import name_prefix
from dlrover_run.events.writer import KEPT_FILES, rotated

MAX_LINE = 64 * 1024
"""Maximum bytes of a line: an event has bounded texts."""

_NAME = re.compile(r"(?:.+\.)?events\.jsonl(?:\.(\d+))?")

_DECODER: msgspec.json.Decoder[Event] = msgspec.json.Decoder(AnyEvent)


@dataclass(frozen=True)
class AgentLog:
    """The events of one agent in their order. `unread` lines were damaged, incomplete, or events of another version."""

    opened: LogOpened
    events: tuple[Event, ...] = ()
    unread: int = 0

    @property
    def torn_head(self) -> bool:
        """Whether files before these are gone."""
        return self.opened.part > 0

    @property
    def ended(self) -> AgentEnded | None:
        """The agent's end, None where it still runs, or has not written its end."""
        return next((event for event in reversed(self.events) if isinstance(event, AgentEnded)), None)

    @property
    def last(self) -> Event:
        """The last event, or the first line if there is none."""
        return self.events[-1] if self.events else self.opened


class NoEventLog(Exception):
    """There is no event log where one was looked for; the message names the place."""


def parse_log(lines: Iterable[bytes]) -> AgentLog | None:
    """The log of one agent from the lines of its files, in the order of these files; None without a first line.

    Lines before the first line are lost: without it their job and their workers are not known.
    """
    opened: LogOpened | None = None
    events: list[Event] = []
    unread = 0
    for line in lines:
        if not line.strip():
            continue
        event: Event | None = None
        if len(line) <= MAX_LINE:
            with contextlib.suppress(ValueError, RecursionError):
                event = _DECODER.decode(line)
        if isinstance(event, LogOpened):
            opened = opened or event
        elif event is None or opened is None:
            unread += 1
        else:
            events.append(event)
    return None if opened is None else AgentLog(opened, tuple(events), unread)


def read_logs(place: str | os.PathLike[str], job: str | None = None) -> list[AgentLog]:
    """The logs of all agents in a directory and below it, or in one file with the files that it has rotated. They are
    sorted by their first line. With `job`, other jobs' files are not read where names tell. Raises NoEventLog, and
    OSError for what cannot be read."""
    root = Path(place)
    if root.is_dir():
        bases = sorted({_base(path) for path in root.rglob("*events.jsonl*") if _NAME.fullmatch(path.name)})
        if job is not None:
            bases = [base for base in bases if base.name == FILE_NAME or base.name.startswith(name_prefix(job))]
    else:
        bases = [_base(root)]
    logs = [log for base in bases if (log := _read_one(base)) is not None]
    if not logs:
        raise NoEventLog(f"there is no event log (*{FILE_NAME}) in {root}")
    return sorted(logs, key=lambda log: (log.opened.time, log.opened.node_id))


def other_runs(logs: Sequence[AgentLog], chosen: Sequence[AgentLog]) -> list[str]:
    """The jobs, each once, that have logs beside the chosen ones."""
    return sorted({log.opened.job for log in logs if log not in chosen})


def latest_run(logs: Sequence[AgentLog]) -> list[AgentLog]:
    """The logs of the job that began last, where a directory holds those of several jobs. A job with the same name that
    had ended before is another one; a job whose agents were only killed or stopped continues."""
    newest = max(logs, key=lambda log: log.opened.time, default=None)
    if newest is None:
        return []
    same = [log for log in logs if log.opened.job == newest.opened.job]
    times = (event.time for log in same for event in log.events if isinstance(event, JobEnded))
    before = max((time for time in times if time < newest.opened.time), default=None)
    return [log for log in same if before is None or log.opened.time > before]


def read_log(path: Path) -> AgentLog | None:
    """The log of one agent, from its newest file and those that it has rotated; None if it cannot be read, or has no
    first line."""
    try:
        return _read_one(path)
    except OSError:
        return None


def read_head(path: Path) -> LogOpened | None:
    """The first line of a file of a log; None without one."""
    try:
        with path.open("rb") as file:
            log = parse_log([file.readline(MAX_LINE + 1)])
    except OSError:
        return None
    return None if log is None else log.opened


def runs_of(logs: Sequence[AgentLog]) -> list[list[AgentLog]]:
    """The logs of each run of one job, the last run first (`latest_run`)."""
    runs = []
    rest = list(logs)
    while rest:
        runs.append(latest_run(rest))
        rest = [log for log in rest if not any(log is other for other in runs[-1])]
    return runs


def _base(path: Path) -> Path:
    """The newest file of the agent that wrote this one: a rotated file has a number at its end."""
    found = _NAME.fullmatch(path.name)
    return path.with_suffix("") if found is not None and found[1] is not None else path


def _read_one(base: Path) -> AgentLog | None:
    if base.is_symlink():
        # The rotated files are beside the file itself.
        base = base.resolve()
    # They are looked for by their names: the directory may have the logs of thousands of agents.
    files = [*(rotated(base, number) for number in range(KEPT_FILES, 0, -1)), base]
    return parse_log(_lines([path for path in files if path.is_file()]))


def _lines(paths: Sequence[Path]) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE + 1):
                yield line
                while len(line) > MAX_LINE and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE + 1)


@dataclass(frozen=True)
class Entry:
    """One event, and the agent that wrote it."""

    opened: LogOpened
    event: Event


def merged(logs: Sequence[AgentLog]) -> Iterator[Entry]:
    """The events of all agents by their time. The order of one agent's events is kept where its clock was set back."""

    def timed(log: AgentLog, place: int) -> Iterator[tuple[datetime, int, int, Entry]]:
        latest = log.opened.time
        for number, event in enumerate((log.opened, *log.events)):
            latest = max(latest, event.time)
            yield latest, place, number, Entry(log.opened, event)

    found = heapq.merge(*(timed(log, place) for place, log in enumerate(logs)), key=lambda each: each[:3])
    return (entry for _, _, _, entry in found)
