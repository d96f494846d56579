"""The subcommands for operators: `status`, `top`, `why`, `events`, `drain` and `stop`.

Each finds its job (`find`), asks it once or reads its event logs, and prints plain lines. Their exit codes are for
scripts.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import sys
from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from dlrover_run import exit_codes
from dlrover_run.agent.host import host_name
from dlrover_run.command_line import options, values
from dlrover_run.command_line.application import flag_option
from dlrover_run.command_line.entry_point import report
from dlrover_run.command_line.options import OTHER, OUTPUT
from dlrover_run.command_line.parser import CommandLine, FlagValues, Program, UsageError
from dlrover_run.console.text import sanitize
from dlrover_run.coordination.reasons import Reasons
from dlrover_run.coordination.requests import Action, OperatorRequest
from dlrover_run.coordination.status import JobState, JobStatus, NodeCondition
from dlrover_run.operate.drain import drain_problem, named
from dlrover_run.operate.find import Job, find_job
from dlrover_run.operate.text import NodeProgress, render_status, table
from dlrover_run.rendezvous.client import AskFailed

WAITING, FAILED, NO_JOB = 1, 2, 3
"""Exit codes of `status`: the job waits, it has failed, and there is none. 0: it trains, or has succeeded."""

REFUSED = 1
"""The exit code of `drain` and `stop` when the job does not carry out the request."""

WAIT_INTERVAL = 1.0
"""Seconds between two looks at a job while `--wait` waits, or `top` shows it."""

_STATES = {JobState.WAITING: WAITING, JobState.FAILED: FAILED}

Result = TypeVar("Result")


def _shared(dest: str, **changed: Any) -> Any:
    return flag_option(options.BY_DEST[dest]._replace(**changed))


Backend = Annotated[
    str | None,
    _shared("rdzv_backend", help="How the nodes of the job meet, if it is elsewhere: [b]c10d[/] or [b]etcd[/]."),
]
Endpoint = Annotated[str | None, _shared("rdzv_endpoint", help="Where the nodes meet, if the job is elsewhere.")]
Id = Annotated[str | None, _shared("rdzv_id", help="Name of the job.")]
Conf = Annotated[str | None, _shared("rdzv_conf")]
Timeout = Annotated[
    str, typer.Option(metavar="SECONDS", help="Time until the job must have answered.", rich_help_panel=OTHER)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.", rich_help_panel=OUTPUT)]
Wait = Annotated[bool, typer.Option("--wait", help="Return when it is done.", rich_help_panel=OTHER)]
Logs = Annotated[
    str | None,
    typer.Argument(metavar="[DIR]", help="Event logs of a job that is over, or of other machines.", show_default=False),
]


class _Asker:
    """The job that a command line means."""

    def __init__(self, context: typer.Context, name: str, timeout: str, **given: str | None) -> None:
        self.program: Program = context.find_root().obj
        self.name = f"{self.program.name} {name}"
        self._timeout = values.seconds("--timeout", timeout, zero_allowed=False)
        line = CommandLine({dest: [text] for dest, text in given.items() if text is not None})
        self._flags = FlagValues(line, os.environ, self.program)

    async def find(self) -> Job:
        """The job. Raises SpecError and AskFailed."""
        return await find_job(self._flags, os.environ, self.program)

    async def ask(self, job: Job, request: OperatorRequest | None = None) -> JobStatus:
        """Its status. Raises AskFailed, also when it does not answer in time."""
        try:
            async with asyncio.timeout(self._timeout):
                return await job.ask(request)
        except TimeoutError:
            raise AskFailed(
                f"the job {job.name!r} has not answered within {self._timeout:g} s (--timeout)", no_job=True
            ) from None

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run it to its end."""
        return asyncio.run(work)

    def fail(self, failed: AskFailed) -> int:
        """Report a question without an answer; the exit code."""
        report(self.name, sanitize(str(failed)).rstrip(".") + ".")
        return NO_JOB if failed.no_job else REFUSED


def status(
    context: typer.Context,
    rdzv_backend: Backend = None,
    rdzv_endpoint: Endpoint = None,
    rdzv_id: Id = None,
    rdzv_conf: Conf = None,
    timeout: Timeout = "10",
    as_json: Json = False,
) -> int:
    """Show the state of a running job and of each of its nodes.

    The exit code is 0 if the job trains, 1 if it waits for nodes, 2 if it has failed and 3 if there is no such job.
    Without flags the job is the only one of yours on this machine, or that of the cluster's environment.

    Of a job elsewhere: [b]dlrover-run status --rdzv-endpoint=node0 --rdzv-id=resnet[/]
    """
    asker = _Asker(
        context, "status", timeout,
        rdzv_backend=rdzv_backend, rdzv_endpoint=rdzv_endpoint, rdzv_id=rdzv_id, rdzv_conf=rdzv_conf,
    )  # fmt: skip

    async def show() -> int:
        job = await asker.find()
        found = await asker.ask(job)
        steps = await job.progress()
        print(_json(job, found, steps) if as_json else _text(job, found, steps), flush=True)
        return _STATES.get(found.state, exit_codes.SUCCESS)

    try:
        return asker.run(show())
    except AskFailed as failed:
        asker.fail(failed)
        return NO_JOB


def _text(job: Job, found: JobStatus, steps: NodeProgress) -> str:
    from dlrover_run.operate.logs import effectiveness

    return render_status(found, effectiveness(job.agents, datetime.now(UTC)), steps)


def _json(job: Job, found: JobStatus, steps: NodeProgress) -> str:
    from dlrover_run.operate.logs import effectiveness

    effective = effectiveness(job.agents, datetime.now(UTC))
    data = msgspec.to_builtins(found)
    data["progress"] = msgspec.to_builtins(steps)
    data["ettr"] = None if effective is None else round(effective.ratio, 6)
    return msgspec.json.encode(data).decode()


def top(
    context: typer.Context,
    rdzv_backend: Backend = None,
    rdzv_endpoint: Endpoint = None,
    rdzv_id: Id = None,
    rdzv_conf: Conf = None,
    timeout: Timeout = "10",
) -> int:
    """Show the status of a job until you press Ctrl-C; once a second on a terminal, else after each change."""
    asker = _Asker(
        context, "top", timeout,
        rdzv_backend=rdzv_backend, rdzv_endpoint=rdzv_endpoint, rdzv_id=rdzv_id, rdzv_conf=rdzv_conf,
    )  # fmt: skip

    async def follow() -> int:
        job = await asker.find()
        if not sys.stdout.isatty():
            return await _print_changes(asker, job)
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        with Live(console=Console(), screen=True, auto_refresh=False) as live:
            while True:
                found = await asker.ask(job)
                live.update(
                    Text(_text(job, found, await job.progress()), no_wrap=True, overflow="ellipsis"), refresh=True
                )
                await asyncio.sleep(WAIT_INTERVAL)

    try:
        return asker.run(follow())
    except AskFailed as failed:
        return asker.fail(failed)
    except KeyboardInterrupt:
        return exit_codes.SUCCESS


async def _print_changes(asker: _Asker, job: Job) -> int:
    before = None
    while True:
        found = await asker.ask(job)
        key = (found.state, found.round, found.restarts, {node.node_id: node.state for node in found.nodes})
        if key != before:
            before = key
            print(f"{_text(job, found, await job.progress())}\n", flush=True)
        if found.state in (JobState.SUCCEEDED, JobState.FAILED):
            return _STATES.get(found.state, exit_codes.SUCCESS)
        await asyncio.sleep(WAIT_INTERVAL)


def why(
    context: typer.Context,
    logs: Logs = None,
    last_restart: Annotated[bool, typer.Option("--last-restart", help="Why were the workers restarted?")] = False,
    slow: Annotated[bool, typer.Option("--slow", help="Where does the time go?")] = False,
    start: Annotated[bool, typer.Option("--start", help="Why did the start take so long?")] = False,
    rdzv_id: Id = None,
    timeout: Timeout = "10",
    as_json: Json = False,
) -> int:
    """Say why a job is in its state: why it waits, failed, was restarted, is slow, or was slow to start.

    The answer is from its event logs ([b]--log-dir[/] or [b]--journal[/]), also after its end.

    Of a job that is over: [b]dlrover-run why --last-restart logs/latest[/]
    """
    from dlrover_run.events.why import Question, explain
    from dlrover_run.operate.logs import named_logs, running_logs

    if last_restart + slow + start > 1:
        raise UsageError("Give one of --last-restart, --slow and --start.")
    question = next(
        (each for each, given in (
            (Question.LAST_RESTART, last_restart), (Question.SLOW, slow), (Question.START, start),
        ) if given),
        Question.NOW,
    )  # fmt: skip
    if logs is not None:
        answer = explain(named_logs(logs), question)
    else:
        asker = _Asker(context, "why", timeout, rdzv_id=rdzv_id)
        try:
            job = asker.run(asker.find())
        except AskFailed as failed:
            report(asker.name, "name the event logs of a job that is over, for example logs/latest.")
            return asker.fail(failed)
        found = running_logs(job.agents)
        if not found:
            return _without_logs(asker, job, question is Question.NOW)
        answer = explain(found, question, datetime.now(UTC))
    print(_lines_as_json(answer.lines) if as_json else sanitize(answer.text), flush=True)
    return exit_codes.SUCCESS


def _without_logs(asker: _Asker, job: Job, now: bool) -> int:
    """Answer from the status of a job of which no event log can be read here."""
    if now:
        try:
            found = asker.run(asker.ask(job))
        except AskFailed as failed:
            return asker.fail(failed)
        print(sanitize(found.waiting if found.state is JobState.WAITING else found.reason), flush=True)
    report(asker.name, "the job keeps no event log that this machine can read (--log-dir or --journal keeps one).")
    return exit_codes.SUCCESS if now else NO_JOB


def _lines_as_json(lines: tuple[Reasons, ...]) -> str:
    return msgspec.json.encode(lines).decode()


def events(
    context: typer.Context,
    logs: Logs = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Events from then on: an age (10m), a time (04:12) or a date with a time."),
    ] = None,
    by_node: Annotated[bool, typer.Option("--by-node", help="Count the failures of each node.")] = False,
    rdzv_id: Id = None,
    timeout: Timeout = "10",
    as_json: Json = False,
) -> int:
    """List what happened in a job, from its event logs, also after its end.

    Of a job that is over: [b]dlrover-run events --since=04:00 logs/latest[/]
    """
    from dlrover_run.events.text import describe, short_name
    from dlrover_run.operate.logs import entries_since, failures_by_node, named_logs, parse_since, running_logs

    after = None if since is None else parse_since(since, datetime.now(UTC))
    if logs is not None:
        found = named_logs(logs)
    else:
        asker = _Asker(context, "events", timeout, rdzv_id=rdzv_id)
        try:
            job = asker.run(asker.find())
        except AskFailed as failed:
            report(asker.name, "name the event logs of a job that is over, for example logs/latest.")
            return asker.fail(failed)
        found = running_logs(job.agents)
        if not found:
            return _without_logs(asker, job, now=False)
    if by_node:
        rows = [(host, str(agents), str(failed), last) for host, agents, failed, last in failures_by_node(found, after)]
        print(sanitize("\n".join(table(("HOST", "AGENTS", "FAILURES", "LAST FAILURE"), rows))), flush=True)
        return exit_codes.SUCCESS
    rows = []
    for entry in entries_since(found, after):
        if as_json:
            data = {"host": entry.opened.host, "node_id": entry.opened.node_id, **msgspec.to_builtins(entry.event)}
            print(msgspec.json.encode(data).decode())
        else:
            time = entry.event.time.astimezone().strftime("%Y-%m-%d %H:%M:%S")
            rows.append((time, entry.opened.host, short_name(entry.event), describe(entry.event).replace("\n", " ")))
    if rows:
        print(sanitize("\n".join(table(("TIME", "HOST", "EVENT", ""), rows))))
    sys.stdout.flush()
    return exit_codes.SUCCESS


def drain(
    context: typer.Context,
    node: Annotated[str, typer.Argument(metavar="NODE", help="Rank, host or id of the node, as in `status`.")],
    force: Annotated[
        bool, typer.Option("--force", help="Also if the job then has too few nodes.", rich_help_panel=OTHER)
    ] = False,
    wait: Wait = False,
    rdzv_backend: Backend = None,
    rdzv_endpoint: Endpoint = None,
    rdzv_id: Id = None,
    rdzv_conf: Conf = None,
    timeout: Timeout = "10",
) -> int:
    """Ask one node to leave the job: its workers get the time to save, and a spare takes its place.

    The others form a new round without it, which costs no restart. A node that the job cannot do without is refused.
    """
    asker = _Asker(
        context, "drain", timeout,
        rdzv_backend=rdzv_backend, rdzv_endpoint=rdzv_endpoint, rdzv_id=rdzv_id, rdzv_conf=rdzv_conf,
    )  # fmt: skip

    async def request() -> int:
        job = await asker.find()
        before = await asker.ask(job)
        if not force and (problem := drain_problem(before, node)) is not None:
            report(asker.name, f"{sanitize(problem)} (--force drains it all the same).")
            return REFUSED
        leaving = {each.node_id for each in named(before, node)}
        await asker.ask(job, OperatorRequest(Action.DRAIN, node, by=_who()))
        print(f"{asker.name}: node {node} is asked to leave the job {job.name!r}", flush=True)
        while wait and leaving:
            found = await asker.ask(job)
            gone = {NodeCondition.DISCONNECTED, NodeCondition.SUCCEEDED}
            leaving &= {each.node_id for each in found.nodes if each.state not in gone}
            if leaving:
                await asyncio.sleep(WAIT_INTERVAL)
        return exit_codes.SUCCESS

    try:
        return asker.run(request())
    except AskFailed as failed:
        return asker.fail(failed)


def stop(
    context: typer.Context,
    wait: Wait = False,
    rdzv_backend: Backend = None,
    rdzv_endpoint: Endpoint = None,
    rdzv_id: Id = None,
    rdzv_conf: Conf = None,
    timeout: Timeout = "10",
) -> int:
    """Stop a job on all of its nodes. The workers get SIGTERM and the time of [b]--shutdown-timeout[/]."""
    asker = _Asker(
        context, "stop", timeout,
        rdzv_backend=rdzv_backend, rdzv_endpoint=rdzv_endpoint, rdzv_id=rdzv_id, rdzv_conf=rdzv_conf,
    )  # fmt: skip

    async def request() -> int:
        job = await asker.find()
        await asker.ask(job, OperatorRequest(Action.STOP, by=_who()))
        print(f"{asker.name}: the job {job.name!r} stops", flush=True)
        while wait:
            try:
                found = await asker.ask(job)
            except AskFailed:
                break
            if not any(each.state is not NodeCondition.DISCONNECTED for each in found.nodes):
                break
            await asyncio.sleep(WAIT_INTERVAL)
        return exit_codes.SUCCESS

    try:
        return asker.run(request())
    except AskFailed as failed:
        return asker.fail(failed)


def _who() -> str:
    """The user of this process and the machine, for messages of the job."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{host_name()}"[:255]
