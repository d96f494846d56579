"""The subcommand `logs`: the output of a job's workers, from the nodes that keep it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
from typing import Annotated

import typer
from msgspec.structs import replace

from dlrover_run import exit_codes
from dlrover_run.command_line import values
from dlrover_run.command_line.entry_point import report
from dlrover_run.features.operate.commands.asker import FLAGS, MAX_DIGITS, REFUSED, Asker, operator_command
from dlrover_run.features.operate.commands.pipe import while_read
from dlrover_run.features.operate.display.output import FOLLOW_WAIT, OutputPrinter, follow, workers_of
from dlrover_run.features.operate.jobs.find import FoundJob
from dlrover_run.job_status.questions import LogRequest, StackQuery
from dlrover_run.job_status.stacks import JobStacks
from dlrover_run.rendezvous.client import AskFailed
from dlrover_run.spec import UsageError
from dlrover_run.words.text import counted

DEFAULT_LINES = 10
"""Lines of each stream that are printed if no worker is named."""

MAX_LINES = 1_000_000
"""More lines than a node keeps."""


@operator_command(*FLAGS, refused=REFUSED, timeout="20")
async def logs(
    asker: Asker,
    rank: Annotated[
        str | None, typer.Option("--rank", metavar="R", help="Only this worker: its rank, or a task.")
    ] = None,
    node: Annotated[str | None, typer.Option("--node", metavar="N", help="Only this node: rank, host or id.")] = None,
    follows: Annotated[bool, typer.Option("--follow", "-f", help="Print what is written from now on, too.")] = False,
    previous: Annotated[
        bool, typer.Option("--previous", "-p", help="Output of the workers before the last restart.")
    ] = False,
    tail: Annotated[
        str | None,
        typer.Option(
            "--tail", metavar="N", help="Lines of each stream, 0 for all. By default all of one worker, else 10."
        ),
    ] = None,
) -> int:
    """Print the latest output of the workers of a job, from any of its nodes.

    What goes to log files is read from them. Else each node keeps the end of each stream, 32 KiB or more, also that of
    the worker before the last restart ([b]--previous[/]). With [b]-f[/] it ends when the job does.

    The output of one worker: [b]dlrover-run logs -f --rank=3[/]

    What it wrote before it failed: [b]dlrover-run logs --previous --rank=3[/]
    """
    if rank is not None and (len(rank) > 64 or not (rank.isdecimal() or re.fullmatch(r"[a-z]+-\d+", rank))):
        raise values.invalid("--rank", rank, "is no rank", "give a number such as 7")
    if follows and previous:
        raise UsageError("Give --previous without -f: workers that have ended write nothing more.")
    default = 0 if rank is not None else DEFAULT_LINES
    lines = default if tail is None else min(MAX_LINES, values.integer("--tail", tail, 0))
    number = int(rank) if rank is not None and rank.isdecimal() and len(rank) <= MAX_DIGITS else None
    worker = (rank or "") if number is None else str(number)
    request = LogRequest(worker, lines, previous=previous)
    query = StackQuery(number, node or "", request)
    job = await asker.find()
    found = await asker.stacks(job, query)
    if not has_output(found):
        reason = await _no_output(asker, job, query, found)
        if not follows:
            raise AskFailed(reason)
        report(asker.name, f"{reason}; the next lines are shown when they come.")
    reading = asyncio.current_task()
    if follows and reading is not None:
        # The default action of the signal would end in the middle of a line.
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, reading.cancel)
    printer = OutputPrinter(sys.stdout.write, several=len(workers_of(found)) > 1)
    printer.show(found.logs)
    sys.stdout.flush()
    if found.logs_omitted:
        report(asker.name, f"{counted(found.logs_omitted, 'stream')} had no room: give --rank, --node or --tail")
    for each in found.silent:
        report(asker.name, f"node {each.host if each.node is None else each.node} has not answered")
    if follows:
        further = replace(query, logs=replace(request, wait=FOLLOW_WAIT))
        with contextlib.suppress(asyncio.CancelledError):
            following = follow(lambda query: asker.stacks(job, query), further, found, printer)
            report(asker.name, await while_read(following))
    return exit_codes.SUCCESS


def has_output(found: JobStacks) -> bool:
    """Whether an answer has any output."""
    return any(piece.data for piece in found.logs)


async def _no_output(asker: Asker, job: FoundJob, query: StackQuery, found: JobStacks) -> str:
    """Why there is no output in an answer, and what to type instead, as a clause."""
    request = query.logs
    assert request is not None, "output was asked for"
    who = f"rank {request.worker}" if request.worker else "any worker"
    if found.silent:
        hosts = ", ".join(each.host for each in found.silent[:3])
        return f"there is no output of {who}: no answer from {hosts}"
    if request.previous:
        first = ": the job has not been restarted" if found.round <= 1 else " that is kept on its node"
        return f"there is no output of {who} from before a restart{first}"
    with contextlib.suppress(AskFailed):
        if has_output(await asker.stacks(job, replace(query, logs=replace(request, previous=True)))):
            who = f"rank {request.worker} has" if request.worker else "the workers have"
            again = asker.command("logs", "--previous", rank=request.worker, node=query.node)
            return f"{who} written nothing since the last restart: `{again}` prints what was written before it"
    return f"there is no output of {who}: none was written to a file or through the launcher's console"
