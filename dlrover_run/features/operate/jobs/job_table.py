"""The table of the jobs on this machine: what each one runs, where it is, and what it does."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, TextIO

import msgspec

from dlrover_run.background import TimeLimit
from dlrover_run.console.text import format_duration, sanitize
from dlrover_run.features.operate.display.ids import short_ids
from dlrover_run.features.operate.display.text import table
from dlrover_run.features.operate.jobs.survey import SURVEY_WIDTH, FoundAgent, SilentAgent, ask_agent
from dlrover_run.features.operate.protocol import AgentInfo, AgentRequest
from dlrover_run.job_status.status import JobStatus

if TYPE_CHECKING:
    from dlrover_run.features.operate.jobs.ended import EndedJob

STATUS_TIMEOUT = 5.0
"""Seconds that the coordinator of a job has to say what the job does, for the table."""

REFUSED_STATE = "refused"
"""What is shown of an agent that takes no requests of this user."""

MIN_CELL, MAX_CELL = 10, 40
"""Characters of a script in the table, on a narrow terminal and elsewhere."""


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """One job. `pid` is that of its launcher, 0 if it cannot be seen from here, `pids` those of all its launchers here;
    `state` is empty if its agent or its coordinator does not answer, and `nodes`, `workers` and `seconds` are None
    then. `ended` is when it has ended, None for one that runs."""

    job: str
    program: str
    script: str
    pid: int
    pids: tuple[int, ...]
    user: str
    state: str = ""
    nodes: int | None = None
    workers: int | None = None
    seconds: float | None = None
    ended: datetime | None = None


async def job_rows(jobs: Sequence[list[FoundAgent]], silent: Sequence[SilentAgent]) -> list[JobRow]:
    """A row for each job, the oldest first; then the agents that do not answer."""
    width = asyncio.Semaphore(SURVEY_WIDTH)

    async def ask(agents: list[FoundAgent]) -> JobStatus | None:
        async with width:
            try:
                async with TimeLimit(STATUS_TIMEOUT):
                    for name, _ in agents:
                        if (reply := await ask_agent(name, AgentRequest(status=True))) is not None:
                            return reply.status
            except TimeoutError:
                pass
            return None

    found = await asyncio.gather(*map(ask, jobs))
    rows = [_row([agent for _, agent in agents], status) for agents, status in zip(jobs, found, strict=True)]
    rows.sort(key=lambda row: (-(row.seconds or 0), row.pid))
    return rows + [
        JobRow(
            job="",
            program="",
            script="",
            pid=one.pid,
            pids=(one.pid,),
            user=user_name(one.uid),
            state=REFUSED_STATE if one.is_refused else "",
        )
        for one in silent
    ]


def _row(agents: Sequence[AgentInfo], status: JobStatus | None) -> JobRow:
    first = max(agents, key=lambda agent: agent.seconds)
    return JobRow(
        job=first.job,
        program=first.program,
        script=first.script,
        pid=first.pids_here[0] if first.pids_here else 0,
        pids=tuple(sorted({agent.pids_here[0] for agent in agents if agent.pids_here})),
        user=user_name(first.uid),
        state="" if status is None else status.state.value,
        nodes=None if status is None else status.round_nodes or sum(status.node_counts.values()),
        workers=None if status is None else status.workers,
        seconds=first.seconds or None,
    )


def ended_row(job: EndedJob) -> JobRow:
    """The row of a job that has ended."""
    heads = [log.opened for log in job.logs]
    pids = sorted({head.launcher or head.pid for head in heads})
    return JobRow(
        job=job.name,
        program=heads[0].program,
        script=heads[0].script,
        pid=pids[0],
        pids=tuple(pids),
        user=user_name(os.geteuid()),
        state=job.state,
        nodes=job.nodes or None,
        workers=job.workers or None,
        seconds=job.seconds,
        ended=job.ended,
    )


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def terminal_width(stream: TextIO | None = None) -> int | None:
    """The columns of the terminal that a stream, by default stdout, writes to; None if it writes elsewhere."""
    return shutil.get_terminal_size().columns if (stream or sys.stdout).isatty() else None


def render_jobs(rows: Sequence[JobRow], width: int | None = None) -> str:
    """The table for a person. The user is shown to root, and where there are several. Scripts are shortened so that
    its lines fit in `width` columns, as far as MIN_CELL allows."""
    ids = short_ids([row.job for row in rows if row.job])
    users = os.geteuid() == 0 or len({row.user for row in rows}) > 1
    ended = any(row.ended is not None for row in rows)
    head = ("JOB", *(["USER"] * users), "SCRIPT", "PID", "STATE", "NODES", "WORKERS", "UP", *(["ENDED"] * ended))
    drawn = [table(head, [_cells(row, ids, users, MAX_CELL, ended) for row in rows])]
    widest = max(map(len, drawn[0]))
    if width is not None and widest > width:
        longest = min(MAX_CELL, max(len(row.script) for row in rows))
        cell = max(MIN_CELL, longest - (widest - width))
        drawn.append(table(head, [_cells(row, ids, users, cell, ended) for row in rows]))
    return sanitize("\n".join(drawn[-1]))


def _cells(row: JobRow, ids: Mapping[str, str], users: bool, most: int, ended: bool) -> tuple[str, ...]:
    script = row.script if len(row.script) <= most else f"{row.script[: most - 1]}…"
    return (
        ids.get(row.job) or "-",
        *([row.user] * users),
        script.replace("\n", " ") or "-",
        str(row.pid) if row.pid else "-",
        row.state or "no answer",
        "-" if row.nodes is None else str(row.nodes),
        "-" if row.workers is None else str(row.workers),
        "-" if row.seconds is None else format_duration(row.seconds),
        *(["-" if row.ended is None else row.ended.astimezone().strftime("%Y-%m-%d %H:%M")] * ended),
    )
