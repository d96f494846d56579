"""The subcommands for a running job: `jobs`, `status`, `top`, `stacks`, `drain` and `stop`.

Each finds its job (`jobs.find`), asks it, and prints plain lines. Their exit codes are for scripts.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from dlrover_run import exit_codes
from dlrover_run.command_line import values
from dlrover_run.command_line.entry_point import report
from dlrover_run.console.text import RED, colored, format_duration, sanitize, use_color
from dlrover_run.coordination.records.requests import Action, OperatorRequest
from dlrover_run.features.operate.commands.asker import (
    FLAGS,
    MAX_DIGITS,
    REFUSED,
    Asker,
    Json,
    NoAnswer,
    operator_command,
    requester,
)
from dlrover_run.features.operate.commands.completion import complete_node
from dlrover_run.features.operate.commands.pipe import while_read
from dlrover_run.features.operate.display.text import Line, StatusLines, render_stacks, status_lines
from dlrover_run.features.operate.jobs.find import FoundJob, Readings, survey_here
from dlrover_run.features.operate.jobs.job_table import REFUSED_STATE, ended_row, job_rows, render_jobs, terminal_width
from dlrover_run.features.operate.jobs.survey import group
from dlrover_run.job_status.questions import StackQuery
from dlrover_run.job_status.status import (
    JobState,
    JobStatus,
    NodeCondition,
    NodeStatus,
    with_readings,
)
from dlrover_run.rendezvous.client import AskFailed
from dlrover_run.words.text import counted

if TYPE_CHECKING:
    from dlrover_run.features.operate.protocol import JobEnding

WAITING, FAILED = 1, 2
"""Exit codes of `status`: the job waits, and it has failed. 0: it trains, or has succeeded."""

MAX_ENDED = 50
"""Jobs that have ended which are listed, the last ones."""

WAIT_INTERVAL = 1.0
"""Seconds between two looks at a job while `--wait` waits, or `top` shows it."""

_TRAINS_ON = frozenset({NodeCondition.TRAINING, NodeCondition.STARTING, NodeCondition.SPARE, NodeCondition.WAITING})

_STATES = {JobState.WAITING: WAITING, JobState.FAILED: FAILED}

Wait = Annotated[bool, typer.Option("--wait", help="Return when it is done.")]


@operator_command(*FLAGS)
async def status(asker: Asker, as_json: Json = False) -> int:
    """Show the state of a running job and of each of its nodes.

    The exit code is 0 if the job trains, 1 if it waits for nodes, 2 if it has failed and 3 if there is no such job.
    Without flags the job is the only one of yours on this machine, or that of the cluster's environment.

    ETTR, the effective training time ratio, is the share of the workers' time that was training, since the job began:
    not the start, imports, waits, restarts, stalls and lost work. Where no steps are counted it is at most that.

    Of a job elsewhere: [b]dlrover-run status --rdzv-endpoint=node0 --rdzv-id=resnet[/]
    """
    from dlrover_run.features.operate.jobs.event_logs import effectiveness

    job = await asker.find()
    found = await asker.ask(job)
    if as_json:
        effective = effectiveness(job.agents)
        here = await job.readings()
        data = msgspec.to_builtins(_with_readings(found, here))
        data["progress"] = {node: msgspec.to_builtins(reply.tasks) for node, reply in here.items() if reply.tasks}
        data["ettr"] = None if effective is None else round(effective.ratio, 6)
        print(msgspec.json.encode(data).decode(), flush=True)
    else:
        lines = (await status_of(job, found, terminal_width())).all
        print("\n".join(painted(line) for line in lines), flush=True)
    return _STATES.get(found.state, exit_codes.SUCCESS)


@operator_command()
async def jobs(
    asker: Asker,
    show_ended: Annotated[
        bool, typer.Option("--all", "-a", help="Also your jobs that have ended here, the last one first.")
    ] = False,
    as_json: Json = False,
) -> int:
    """List the jobs on this machine: yours, and for root those of all users.

    The PID is that of the launcher. Every other command takes it, an id, or the beginning of an id that no other job
    has: [b]dlrover-run status 3f2[/]

    Of a job that has ended [b]why[/] and [b]events[/] say more: [b]dlrover-run why 3f2[/]
    """
    everyone = await survey_here()
    rows = await job_rows(group(everyone.found), everyone.silent)
    if show_ended:
        from dlrover_run.features.operate.jobs.ended import EndedJobs

        rows += map(ended_row, itertools.islice(EndedJobs(), MAX_ENDED))
    if as_json:
        print(msgspec.json.encode(rows).decode(), flush=True)
    elif rows:
        print(render_jobs(rows, terminal_width()), flush=True)
    else:
        what = "runs here, and none has ended" if show_ended else "runs here; --all lists those that have ended"
        report(asker.name, f"{'no job' if os.geteuid() == 0 else 'no job of yours'} {what}")
    if not as_json and any(row.state == REFUSED_STATE for row in rows):
        report(asker.name, "a job that is refused runs in another user namespace: ask it inside of its container")
    return exit_codes.SUCCESS


async def status_of(job: FoundJob, found: JobStatus, width: int | None = None) -> StatusLines:
    """The lines of the status of a job, with what the agents here know of it."""
    from dlrover_run.features.operate.jobs.event_logs import effectiveness

    here = await job.readings()
    tasks = {node: reply.tasks for node, reply in here.items()}
    return status_lines(_with_readings(found, here), effectiveness(job.agents), tasks, width)


def _with_readings(status: JobStatus, here: Readings) -> JobStatus:
    memory = {node: reply.memory for node, reply in here.items() if reply.memory is not None}
    use = {node: reply.use for node, reply in here.items() if reply.use is not None}
    return with_readings(status, memory, use)


def painted(line: Line) -> str:
    """A line with its colour."""
    return colored(line.text, RED if line.bad and use_color(sys.stdout.isatty(), os.environ) else "")


@operator_command(*FLAGS)
async def top(asker: Asker) -> int:
    """Show the status of a job until it ends or you press q: each second on a terminal, else after each change.

    The exit code is 0 if the job goes on or has succeeded, and 2 if it has failed. The arrows scroll.
    """
    job = await asker.find()
    # An error before the first answer is one of this command; after it, the job has ended.
    found = [await asker.ask(job)]
    async with job.endings() as endings:

        async def look() -> StatusLines | None:
            try:
                found.append(await asker.ask(job))
            except AskFailed as failed:
                if not failed.no_job:
                    raise
                return None
            del found[:-1]
            return await status_of(job, found[-1], terminal_width())

        if sys.stdout.isatty():
            from dlrover_run.features.operate.display.top import watch

            last = await watch(look)
            if last is None:
                return exit_codes.SUCCESS
            print("\n".join(painted(line) for line in last.all))
        else:
            await while_read(_print_changes(look, found))
        ending = await endings.last()
    return _report_ending(asker, job, found[-1], ending)


def _report_ending(asker: Asker, job: FoundJob, last: JobStatus, ending: JobEnding | None) -> int:
    """Print what has become of a job, and return the exit code."""
    if ending is None and last.state is JobState.TRAINING:
        raise AskFailed(f"the job {job.name!r} does not answer any more; `why` may know what has become of it", True)
    failed = last.state is JobState.FAILED if ending is None else ending.exit_code != 0
    seconds = last.age if ending is None else ending.seconds
    after = "" if seconds is None else f" after {format_duration(seconds)}"
    why = "" if ending is None or not failed else f": {ending.reason}"
    restarts = f", {counted(last.restarts, 'restart')}"
    result = "ended with an error" if failed else "succeeded"
    print(sanitize(f"{asker.name}: the job {job.name!r} has {result}{after}{restarts}{why}"), flush=True)
    return FAILED if failed else exit_codes.SUCCESS


def what_changes(found: JobStatus) -> tuple[object, ...]:
    """What of a status is printed again when it has changed: not its times, nor figures that always grow."""
    choice = found.size_choice
    size = None if choice is None else (choice.wanted_nodes, choice.condition, choice.paused, len(choice.sizes))
    return (
        found.state,
        found.hang,
        found.round,
        found.restarts,
        {node.node_id: node.state for node in found.nodes},
        size,
    )


async def _print_changes(look: Callable[[], Awaitable[StatusLines | None]], found: list[JobStatus]) -> None:
    """Print what `look` returns after each change, until the job has ended. It adds the status to `found`."""
    before = None
    while (lines := await look()) is not None:
        if (state := what_changes(found[-1])) != before:
            before = state
            print("\n".join(line.text for line in lines.all) + "\n", flush=True)
        if found[-1].state in (JobState.SUCCEEDED, JobState.FAILED):
            return
        await asyncio.sleep(WAIT_INTERVAL)


@operator_command(*FLAGS, refused=REFUSED, timeout="20")
async def stacks(
    asker: Asker,
    rank: Annotated[str | None, typer.Option("--rank", metavar="R", help="Only the worker with this rank.")] = None,
    node: Annotated[
        str | None,
        typer.Option("--node", metavar="N", help="Only this node: rank, host or id."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Show what all workers of a job do now: the calls of their main threads, equal ones once.

    The workers do not stop for it. A node that does not answer within 5 seconds is named.

    Of one worker: [b]dlrover-run stacks --rank=7[/]
    """
    if rank is not None and not (rank.isdecimal() and len(rank) <= MAX_DIGITS):
        raise values.invalid("--rank", rank, "is no rank", "give a number such as 7")
    query = StackQuery(None if rank is None else int(rank), node or "")
    found = await asker.stacks(await asker.find(), query)
    print(msgspec.json.encode(found).decode() if as_json else render_stacks(found), flush=True)
    return exit_codes.SUCCESS if found.stacks or not (found.missing or found.silent) else REFUSED


def named(status: JobStatus, name: str) -> list[NodeStatus]:
    """The nodes that have this rank, host or id."""
    ranked = [node for node in status.nodes if node.node is not None and str(node.node) == name]
    return ranked or [node for node in status.nodes if name in (node.host, node.node_id)]


def drain_problem(status: JobStatus, name: str) -> str | None:
    """Why the job could not train without the node of this name, a clause; None if it can."""
    leaving = {node.node_id for node in named(status, name)}
    if not leaving or status.max_restarts is None or status.state is not JobState.TRAINING:
        # Without ranks the tasks move to other nodes.
        return None
    left = sum(node.state in _TRAINS_ON and node.node_id not in leaving for node in status.nodes)
    if left + status.nodes_omitted >= status.min_nodes:
        return None
    least = counted(status.min_nodes, "node")
    return f"the job needs at least {least} and would have {left}; it would wait for another one"


@operator_command(*FLAGS, refused=REFUSED)
async def drain(
    asker: Asker,
    node: Annotated[
        str,
        typer.Argument(
            metavar="NODE", help="Rank, host or id of the node, as in [b]status[/].", autocompletion=complete_node
        ),
    ],
    force: Annotated[bool, typer.Option("--force", help="Also if the job then has too few nodes.")] = False,
    wait: Wait = False,
) -> int:
    """Ask one node to leave the job: its workers get the time to save, and a spare takes its place.

    The others form a new round without it, which costs no restart. A node that the job cannot do without is refused.
    """
    job = await asker.find()
    before = await asker.ask(job)
    if not force and (problem := drain_problem(before, node)) is not None:
        raise AskFailed(f"{problem} (--force drains it all the same)")
    leaving = {each.node_id for each in named(before, node)}
    await asker.ask(job, OperatorRequest(Action.DRAIN, node, by=requester()))
    print(f"{asker.name}: node {node} is asked to leave the job {job.name!r}", flush=True)
    while wait and leaving:
        found = await asker.ask(job)
        gone = {NodeCondition.DISCONNECTED, NodeCondition.SUCCEEDED}
        leaving &= {each.node_id for each in found.nodes if each.state not in gone}
        if leaving:
            await asyncio.sleep(WAIT_INTERVAL)
        else:
            print(f"{asker.name}: node {node} has left", flush=True)
    return exit_codes.SUCCESS


@operator_command(*FLAGS, refused=REFUSED)
async def stop(asker: Asker, wait: Wait = False) -> int:
    """Stop a job on all of its nodes. The workers get SIGTERM and the time of [b]--shutdown-timeout[/]."""
    job = await asker.find()
    answer = (await asker.ask(job, OperatorRequest(Action.STOP, by=requester()))).answer
    print(f"{asker.name}: {answer or f'the job {job.name!r} stops'}", flush=True)
    while wait:
        try:
            found: JobStatus | None = await asker.ask(job)
        except NoAnswer:
            raise
        except AskFailed:
            found = None
        if found is None or all(each.state is NodeCondition.DISCONNECTED for each in found.nodes):
            print(f"{asker.name}: the job {job.name!r} has ended", flush=True)
            break
        await asyncio.sleep(WAIT_INTERVAL)
    return exit_codes.SUCCESS
