"""The shell's candidates for the jobs of this machine and their nodes.

The completion of a subcommand calls these while the user types. Whatever goes wrong then, there are no candidates.
"""

from __future__ import annotations

import asyncio
import itertools
import os

import typer

from dlrover_run.background import TimeLimit
from dlrover_run.command_line.sources import FlagValues
from dlrover_run.features.operate.jobs.find import find_job, survey_here
from dlrover_run.features.operate.jobs.survey import group

MAX_ENDED = 20
"""Jobs with a log which are candidates, the last ones."""

COMPLETION_TIMEOUT = 2.0
"""Seconds that the user waits for candidates at most."""


def complete_job(incomplete: str) -> list[str]:
    """The names of the jobs here that begin so, and the pids of their launchers."""

    async def names() -> list[str]:
        async with TimeLimit(COMPLETION_TIMEOUT):
            jobs = group((await survey_here()).found)
        return [word for job in jobs for word in (job[0][1].job, *map(str, job[0][1].pids_here[:1]))]

    try:
        return [name for name in asyncio.run(names()) if name.startswith(incomplete)]
    except Exception:
        return []


def complete_any_job(incomplete: str) -> list[str]:
    """As `complete_job`, with the last jobs that have ended here."""
    from dlrover_run.features.operate.jobs.ended import EndedJobs

    try:
        ended = list(itertools.islice(EndedJobs().names(incomplete), MAX_ENDED))
    except Exception:
        ended = []
    running = complete_job(incomplete)
    return [*running, *(name for name in ended if name not in running)]


def complete_node(context: typer.Context, incomplete: str) -> list[str]:
    """The ranks and the hosts of the nodes of the job that the words before mean."""
    flags = ("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf")
    values = {dest: [text] for dest in flags if (text := context.params.get(dest))}
    if job := context.params.get("job"):
        values["rdzv_id"] = [job]
    program = context.find_root().obj

    async def names() -> list[str]:
        async with TimeLimit(COMPLETION_TIMEOUT):
            found = await find_job(FlagValues(values, os.environ, program.by_dest), os.environ, program)
            nodes = (await found.ask()).nodes
        return [*(str(node.node) for node in nodes if node.node is not None), *dict.fromkeys(n.host for n in nodes)]

    try:
        return [name for name in asyncio.run(names()) if name.startswith(incomplete)]
    except Exception:
        return []
