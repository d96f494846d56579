"""The event logs of a job: those that a user names, or those of its agents that this machine can read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from dlrover_run.command_line import values
from dlrover_run.events.ledger import build_ledger, knows_steps
from dlrover_run.events.reader import (
    AgentLog,
    Entry,
    NoEventLog,
    latest_run,
    merged,
    other_runs,
    parse_log,
    read_logs,
)
from dlrover_run.events.records import FILE_NAME, WorkerFailed
from dlrover_run.features.operate.display.text import Effectiveness
from dlrover_run.features.operate.jobs.find import FoundJob
from dlrover_run.features.operate.protocol import AgentInfo
from dlrover_run.spec import SpecError
from dlrover_run.words.reasons import shown_names
from dlrover_run.words.text import join_names

MAX_QUICK_BYTES = 8 * 1024 * 1024
"""Bytes of logs that are read for a figure that was not asked for."""


class NamedLogs(NamedTuple):
    """The logs of one run, and the names of the other jobs of which there are logs at that place."""

    logs: list[AgentLog]
    others: list[str]


def named_logs(path: str, job: str | None = None) -> NamedLogs:
    """The logs of a job, else of the last one, in a directory or a file that the user names. Raises SpecError."""
    try:
        found = read_logs(path)
        logs = latest_run([log for log in found if job is None or log.opened.job == job])
        others = other_runs(found, logs)
        if not logs:
            raise SpecError(f"{path!r} has no event log of the job {job!r}, but of {join_names(shown_names(others))}.")
        return NamedLogs(logs, others)
    except NoEventLog as missing:
        raise SpecError(f"{missing}: name the directory of --log-dir or of --journal.") from None
    except OSError as error:
        raise SpecError(f"the event log {path!r} cannot be read: {error.strerror}.") from None


class RunningLogs(NamedTuple):
    """The logs of a running job. `unread` are its agents here whose log this machine cannot read, or that keep none."""

    logs: list[AgentLog]
    unread: list[AgentInfo]


def written_logs(agents: Sequence[AgentInfo]) -> RunningLogs:
    """The logs of running agents of one job and, in a directory that agents share, of the other agents of that run."""
    found: list[AgentLog] = []
    places: set[Path] = set()
    unread = []
    for agent in agents:
        path = Path(agent.log)
        place = path if path.name == FILE_NAME else path.parent
        logs = [log for log in _readable(place, agent.job) if log.opened.job == agent.job] if agent.log else []
        # Of an agent with other files the path may be that of another log, or of none.
        if not any((log.opened.host, log.opened.pid) == (agent.host, agent.pid) for log in logs):
            unread.append(agent)
        elif place not in places:
            places.add(place)
            found += logs
    return RunningLogs(latest_run(found), unread)


async def running_logs(job: FoundJob) -> list[AgentLog]:
    """The logs of the agents of a job on this machine: of each agent the log that it writes if this machine can read
    it, else the events that the agent keeps in memory."""
    written, unread = written_logs(job.agents)
    kept = [log for lines in await job.recent_events(unread) if (log := parse_log(lines)) is not None]
    return sorted([*written, *kept], key=lambda log: (log.opened.time, log.opened.node_id))


def _readable(place: Path, job: str | None = None) -> list[AgentLog]:
    try:
        return read_logs(place, job)
    except (NoEventLog, OSError):
        return []


def effectiveness(agents: Sequence[AgentInfo]) -> Effectiveness | None:
    """The effective training time ratio up to now; None without logs, or if reading them would take long."""
    sizes = 0
    for agent in agents:
        try:
            sizes += Path(agent.log).stat().st_size if agent.log else 0
        except OSError:
            continue
    if not sizes or sizes > MAX_QUICK_BYTES:
        return None
    logs = written_logs(agents).logs
    ratio = build_ledger(logs, datetime.now(UTC), running=True).ettr
    return None if ratio is None else Effectiveness(ratio, len(logs), is_bound=not knows_steps(logs))


_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?")
_AGE = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_since(text: str, now: datetime) -> datetime:
    """The time that `--since` means: an age (`10m`), the last time that the clock showed this (`04:12`), or a date and
    time. Raises SpecError."""
    if clock := _CLOCK.fullmatch(text):
        local = now.astimezone()
        then = local.replace(hour=int(clock[1]), minute=int(clock[2]), second=int(clock[3] or 0), microsecond=0)
        return (then if then <= local else then - timedelta(days=1)).astimezone(UTC)
    try:
        if age := _AGE.fullmatch(text):
            return now - timedelta(seconds=float(age[1]) * _UNITS[age[2]])
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise values.invalid(
            "--since", text, "is no time", "give an age such as 10m, a time such as 04:12, or a date with a time"
        ) from None


def entries_since(logs: Sequence[AgentLog], since: datetime | None) -> list[Entry]:
    """The events of all agents by their time, from that time on."""
    return [entry for entry in merged(logs) if since is None or entry.event.time >= since]


def failures_by_node(logs: Sequence[AgentLog], since: datetime | None) -> list[tuple[str, int, int, str]]:
    """For each host its agents, the failures that began there, and the last one; the host with most failures first."""
    agents = Counter(log.opened.host for log in logs)
    failures: Counter[str] = Counter()
    last: dict[str, str] = {}
    for entry in entries_since(logs, since):
        if isinstance(event := entry.event, WorkerFailed):
            failures[entry.opened.host] += 1
            last[entry.opened.host] = f"{event.name} {event.what}"
    ordered = sorted(agents, key=lambda host: (-failures[host], host))
    return [(host, agents[host], failures[host], last.get(host, "")) for host in ordered]
