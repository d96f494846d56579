"""The subcommands that read the event logs of a job, while it runs and after its end: `why` and `events`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from dlrover_run import exit_codes
from dlrover_run.command_line.entry_point import report
from dlrover_run.console.text import sanitize
from dlrover_run.features.operate.commands.asker import REFUSED, Asker, Json, operator_command
from dlrover_run.features.operate.commands.completion import complete_any_job
from dlrover_run.features.operate.display.ids import short_id
from dlrover_run.features.operate.display.text import table
from dlrover_run.job_status.status import JobState, JobStatus
from dlrover_run.rendezvous.client import AskFailed
from dlrover_run.spec import SpecError, UsageError
from dlrover_run.words.reasons import Reasons, sentence
from dlrover_run.words.text import counted

if TYPE_CHECKING:
    from dlrover_run.events.reader import AgentLog
    from dlrover_run.features.inspect.answers import WhyAnswer
    from dlrover_run.features.inspect.why import Question
    from dlrover_run.features.operate.jobs.find import FoundJob

Logs = Annotated[
    str | None,
    typer.Argument(
        metavar="JOB|DIR",
        help="Id or pid of a job here, also of one that has ended; or a directory with event logs.",
        show_default=False,
        autocompletion=complete_any_job,
    ),
]


@operator_command("rdzv_id")
async def why(
    asker: Asker,
    logs: Logs = None,
    last_restart: Annotated[bool, typer.Option("--last-restart", help="Why were the workers restarted?")] = False,
    slow: Annotated[bool, typer.Option("--slow", help="Where does the time go?")] = False,
    start: Annotated[bool, typer.Option("--start", help="Why did the start take so long?")] = False,
    as_json: Json = False,
) -> int:
    """Say why a job is in its state: why it waits, failed, was restarted, is slow, or was slow to start.

    The answer is from its event logs, also after its end: without a directory, of the last job here.

    Of a job that is over: [b]dlrover-run why --last-restart logs/latest[/]
    """
    from dlrover_run.features.inspect.answers import WhyAnswer
    from dlrover_run.features.inspect.why import Question, explain

    if last_restart + slow + start > 1:
        raise UsageError("Give one of --last-restart, --slow and --start.")
    chosen = {Question.LAST_RESTART: last_restart, Question.SLOW: slow, Question.START: start}
    question = next((question for question, given in chosen.items() if given), Question.NOW)
    found, job = await asker.read_logs(logs)
    if job is not None and not found:
        if question is not Question.NOW:
            raise _no_logs()
        answer = WhyAnswer((_reasons(await asker.ask(job)),))
        report(asker.name, f"{_no_logs()}.")
    else:
        answer = explain(found, question, None if job is None else datetime.now(UTC))
    print(msgspec.json.encode(answer.lines).decode() if as_json else sanitize(answer.text), flush=True)
    if found and (line := _about_steps(found, question, answer, job)):
        report(asker.name, line)
    return exit_codes.SUCCESS


def _about_steps(logs: Sequence[AgentLog], question: Question, answer: WhyAnswer, job: FoundJob | None) -> str:
    """What the answer cannot show because no steps are counted; empty if it does not matter."""
    from dlrover_run.events.ledger import knows_steps
    from dlrover_run.features.inspect.answers import WhyCode
    from dlrover_run.features.inspect.why import Question

    if knows_steps(logs):
        return ""
    remedy = "(a job that is started with --progress=optimizer counts them)"
    if question is Question.SLOW:
        return f"no steps are counted, so the time before the first one counts as training {remedy}."
    trains = any(WhyCode.TRAINS.within(line) or WhyCode.ROUND_FORMED.within(line) for line in answer.lines)
    if job is None or question is not Question.NOW or not trains:
        return ""
    stacks = f"`{logs[0].opened.program} stacks {short_id(job.name)}`"
    return f"no steps are counted, so a worker may hang in its own code: {stacks} shows what each one does {remedy}."


def _reasons(status: JobStatus) -> Reasons:
    """Why a job is in its state, as far as its status shows."""
    known = sentence(status.waiting) if status.waiting and status.state is JobState.WAITING else status.reasons
    return known or sentence(f"the job is {status.state}")


def _no_logs() -> AskFailed:
    return AskFailed(
        "the job keeps no event log that this machine can read (--log-dir or --journal keeps one)", no_job=True
    )


@operator_command("rdzv_id", refused=REFUSED)
async def events(
    asker: Asker,
    logs: Logs = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Events from then on: an age (10m), a time (04:12) or a date with a time."),
    ] = None,
    by_node: Annotated[bool, typer.Option("--by-node", help="Count the failures of each node.")] = False,
    otlp: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Send them to a collector of OpenTelemetry instead, by OTLP over HTTP."),
    ] = None,
    as_json: Json = False,
) -> int:
    """List what happened in a job, from its event logs, also after its end.

    Of a job that is over: [b]dlrover-run events --since=04:00 logs/latest[/]
    """
    from dlrover_run.features.inspect.text import describe, short_name
    from dlrover_run.features.operate.jobs.event_logs import entries_since, failures_by_node, parse_since

    if otlp is not None and (by_node or as_json):
        raise UsageError("Give --otlp without --by-node and --json.")
    after = None if since is None else parse_since(since, datetime.now(UTC))
    found, _ = await asker.read_logs(logs)
    if not found:
        raise _no_logs()
    if otlp is not None:
        return _export(asker, otlp, found, after)
    if by_node:
        counts = failures_by_node(found, after)
        if as_json:
            keys = ("host", "agents", "failures", "last_failure")
            print(msgspec.json.encode([dict(zip(keys, count, strict=True)) for count in counts]).decode(), flush=True)
        else:
            rows = [tuple(map(str, count)) for count in counts]
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


def _export(asker: Asker, url: str, logs: list[AgentLog], since: datetime | None) -> int:
    """Send events to a collector. Raises SpecError and AskFailed."""
    try:
        from dlrover_run.features.operate.web.otlp import parse_endpoint, send
    except ModuleNotFoundError as missing:
        raise SpecError(f"--otlp needs OpenTelemetry ({missing}): pip install 'dlrover-run[otel]'.") from None
    endpoint = parse_endpoint(url)
    spans, records = send(endpoint, logs, since, asker.timeout)
    print(f"{asker.name}: sent {counted(spans, 'span')} and {counted(records, 'log record')} to {endpoint}", flush=True)
    return exit_codes.SUCCESS
