"""How a subcommand for operators finds its job and asks it: its flags, what it asks through, and its exit codes."""

from __future__ import annotations

import asyncio
import getpass
import inspect
import os
import shlex
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from dlrover_run import exit_codes
from dlrover_run.agent.host import host_name
from dlrover_run.background import TimeLimit
from dlrover_run.command_line import values
from dlrover_run.command_line.entry_point import report
from dlrover_run.command_line.flag import OTHER, OUTPUT
from dlrover_run.command_line.flags import BY_DEST
from dlrover_run.command_line.help import flag_option, with_parameters
from dlrover_run.command_line.parse import CommandLine
from dlrover_run.command_line.program import Program
from dlrover_run.command_line.sources import FlagValues
from dlrover_run.console.text import format_duration, sanitize
from dlrover_run.coordination.records.requests import OperatorRequest
from dlrover_run.features.operate.commands.completion import complete_job
from dlrover_run.features.operate.commands.pipe import drop_output
from dlrover_run.features.operate.display.ids import short_id
from dlrover_run.features.operate.jobs.find import FoundJob, SeveralJobs, find_job
from dlrover_run.job_status.questions import StackQuery
from dlrover_run.job_status.stacks import JobStacks
from dlrover_run.job_status.status import JobStatus
from dlrover_run.rendezvous.client import AskFailed
from dlrover_run.spec import UsageError
from dlrover_run.words.reasons import shown_names
from dlrover_run.words.text import join_names

if TYPE_CHECKING:
    from dlrover_run.events.reader import AgentLog
    from dlrover_run.features.operate.jobs.ended import EndedJob

NO_JOB = 3
"""The exit code of all subcommands if there is no such job, or it does not answer."""

REFUSED = 1
"""The exit code of `drain`, `stop` and `stacks` when the job does not carry out the request, or has no stack."""

FLAGS: dict[str, Any] = {
    dest: Annotated[
        str | None,
        flag_option(BY_DEST[dest]._replace(help=help), complete_job if dest == "rdzv_id" else None),
    ]
    for dest, help in (
        ("rdzv_backend", "How the nodes of the job meet, if it is elsewhere: [b]c10d[/] or [b]etcd[/]."),
        ("rdzv_endpoint", "Where the nodes meet, if the job is elsewhere."),
        ("rdzv_id", "Id of the job, or as much of it as tells it from others here; also the pid of its launcher."),
        ("rdzv_conf", BY_DEST["rdzv_conf"].help),
    )
}
"""The flags of the launch command line that find a job, by their names in code."""

_Job = Annotated[
    str | None,
    typer.Argument(
        metavar="JOB",
        help="Id of the job, the beginning of it, or the pid of its launcher, as in [b]jobs[/].",
        show_default=False,
        autocompletion=complete_job,
    ),
]

_Timeout = Annotated[
    str, typer.Option(metavar="SECONDS", help="Time until the job must have answered.", rich_help_panel=OTHER)
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.", rich_help_panel=OUTPUT)]
"""The flag of the subcommands that can print JSON."""

MAX_DIGITS = 15
"""Digits of the largest rank that can be asked for."""

Answer = TypeVar("Answer")


class NoAnswer(AskFailed):
    """The job has not answered in time, so it may go on."""


class Asker:
    """Finds and asks the job that a command line means; `name` begins the lines of the command."""

    def __init__(self, program: Program, command: str, timeout: str, given: dict[str, str | None]) -> None:
        self.program = program
        self.name = f"{program.name} {command}"
        self.timeout = values.seconds("--timeout", timeout, zero_allowed=False)
        self._given = given
        self.flags = self._flags()

    def _flags(self) -> FlagValues:
        line = CommandLine({dest: [text] for dest, text in self._given.items() if text is not None})
        return FlagValues(line.values, os.environ, self.program.by_dest)

    def name_job(self, word: str) -> None:
        """Ask the job that a word on the command line means. Raises UsageError if --rdzv-id names another."""
        if self._given.get("rdzv_id") not in (None, word):
            raise UsageError(f"Give the job once: {word!r}, or --rdzv-id={self._given['rdzv_id']}.")
        self._given["rdzv_id"] = word
        self.flags = self._flags()

    def command(self, *words: str, **flags: str) -> str:
        """Another command for the same job, as a user types it; flags without a value are left out."""
        given = {**flags, **{dest: text or "" for dest, text in self._given.items()}}
        word = given.pop("rdzv_id", "")
        named = (f"--{dest.replace('_', '-')}={text}" for dest, text in given.items() if text)
        return shlex.join((self.program.name, *words, *named, *((word,) if word else ())))

    async def find(self) -> FoundJob:
        """The job. Raises SpecError and AskFailed, which names a job that has ended."""
        try:
            return await find_job(self.flags, os.environ, self.program)
        except AskFailed as failed:
            raise self._ended(failed) or failed from None

    def _ended(self, failed: AskFailed) -> AskFailed | None:
        """What is said instead if the job that was not found has ended here; None if none has."""
        from dlrover_run.features.operate.jobs.ended import EndedJobs

        word = self._given.get("rdzv_id")
        if not (failed.no_job and (ended := EndedJobs().find(word))):
            return None
        if word is None:
            why = shlex.join((self.program.name, "why"))
            return AskFailed(f"{failed}; of {ended.name!r}, which has ended, `{why}` says more", no_job=True)
        return AskFailed(f"the job {ended.name!r} has ended: `{self._why(ended.name)}` says why", no_job=True)

    def _why(self, job: str) -> str:
        """The command that says why a job is in its state."""
        return shlex.join((self.program.name, "why", short_id(job)))

    async def ask(self, job: FoundJob, request: OperatorRequest | None = None) -> JobStatus:
        """Its status. Raises AskFailed, also when it does not answer in time."""
        return await self._in_time(job, job.ask(request))

    async def stacks(self, job: FoundJob, query: StackQuery) -> JobStacks:
        """The stacks of its workers. Raises AskFailed, also when it does not answer in time."""
        return await self._in_time(job, job.stacks(query))

    async def _in_time(self, job: FoundJob, answer: Coroutine[Any, Any, Answer]) -> Answer:
        try:
            async with TimeLimit(self.timeout):
                return await answer
        except TimeoutError:
            raise NoAnswer(
                f"the job {job.name!r} has not answered within {self.timeout:g} s (--timeout)", no_job=True
            ) from None

    async def read_logs(self, place: str | None) -> tuple[list[AgentLog], FoundJob | None]:
        """The event logs at a place that the user names, else those of the running job that this machine can read, and
        this job. Raises SpecError and AskFailed."""
        from dlrover_run.features.operate.jobs.ended import EndedJobs
        from dlrover_run.features.operate.jobs.event_logs import named_logs, running_logs

        if place is not None and _is_job(place):
            self.name_job(place)
        elif place is not None:
            found = named_logs(place, self._given.get("rdzv_id"))
            if found.others and self._given.get("rdzv_id") is None:
                others = join_names(shown_names([repr(name) for name in found.others]))
                name = found.logs[0].opened.job
                report(self.name, f"this is of the job {name!r}; there are logs of {others} too (--rdzv-id).")
            return found.logs, None
        word = self._given.get("rdzv_id")
        try:
            job = await find_job(self.flags, os.environ, self.program)
        except SeveralJobs as several:
            ended = EndedJobs().find(None) if word is None else None
            if ended is None or not ended.is_recent:
                raise
            running = join_names(shown_names([repr(short_id(name)) for name in several.names]))
            self._report_ended(ended, f"; {running} run too: name one for an answer about it")
            return ended.logs, None
        except AskFailed as failed:
            if ended := EndedJobs().find(word):
                self._report_ended(ended)
                return ended.logs, None
            hint = (
                f"none has ended here either (`{self.program.name} jobs --all`): name a directory with its event logs"
            )
            raise AskFailed(f"{failed}; {hint}", failed.no_job) from None
        if word is None and (ended := EndedJobs().find(None)) and ended.is_recent:
            line = f"this is of the job that runs; {ended.name!r} has ended: `{self._why(ended.name)}`."
            report(self.name, sanitize(line))
        logs = await running_logs(job)
        if any(log.torn_head for log in logs):
            report(self.name, "the oldest events of this job are not kept any more.")
        return logs, job

    def _report_ended(self, ended: EndedJob, more: str = "") -> None:
        """Print which job the answer is about."""
        ago = format_duration((datetime.now(UTC) - ended.ended).total_seconds())
        report(self.name, sanitize(f"the job {ended.name!r} has ended {ago} ago; this is of its event log{more}."))


def _is_job(place: str) -> bool:
    """Whether a word that may name event logs can only mean a job."""
    return not os.path.lexists(place) and os.path.basename(place) == place


_Work = Callable[..., Coroutine[Any, Any, int]]


def operator_command(
    *flags: str, refused: int = NO_JOB, no_job: int = NO_JOB, timeout: str = "10"
) -> Callable[[_Work], Callable[..., int]]:
    """Make a subcommand with these flags of the launch command line and --timeout, with its default. The function gets
    an `Asker` for them. `no_job` is the exit code if there is no job, and `refused` if there is one, and it does not
    carry out the request."""

    def decorate(work: _Work) -> Callable[..., int]:
        def run(context: typer.Context, **given: Any) -> int:
            program = context.find_root().obj
            by_flag = {dest: given.pop(dest) for dest in flags}
            job = given.pop("job", None)
            asker = Asker(program, work.__name__, given.pop("timeout"), by_flag)
            if job is not None:
                asker.name_job(job)
            try:
                return asyncio.run(work(asker, **given))
            except AskFailed as failed:
                report(asker.name, sanitize(str(failed)).rstrip(".") + ".")
                return no_job if failed.no_job else refused
            except BrokenPipeError:
                # The reader of its output, as `head`, has all that it wants.
                drop_output()
                return exit_codes.SUCCESS

        own = list(inspect.signature(work, eval_str=True).parameters.values())[1:]
        # `why` and `events` have a word already, which names a job too.
        takes_job = "rdzv_endpoint" in flags
        parameters = [
            Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context),
            *(each.replace(kind=Parameter.KEYWORD_ONLY) for each in own),
            *([Parameter("job", Parameter.KEYWORD_ONLY, default=None, annotation=_Job)] * takes_job),
            *(Parameter(dest, Parameter.KEYWORD_ONLY, default=None, annotation=FLAGS[dest]) for dest in flags),
            Parameter("timeout", Parameter.KEYWORD_ONLY, default=timeout, annotation=_Timeout),
        ]
        run.__doc__ = work.__doc__
        return with_parameters(run, parameters)

    return decorate


def requester() -> str:
    """The user of this process and the machine, for messages of the job."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{host_name()}"[:255]
