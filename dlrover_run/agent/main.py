"""The agent process from its first line to its result, which it prints."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from dlrover_run import exit_codes, launch_request
from dlrover_run.agent.agent import Agent
from dlrover_run.agent.framework import AdapterFactory
from dlrover_run.agent.host import display_name
from dlrover_run.agent.result import JobResult
from dlrover_run.console.console import Console, is_verbose, open_console
from dlrover_run.console.rounds import render_success
from dlrover_run.coordination.records.round import Failure
from dlrover_run.events.event_log import log_opened, open_event_log
from dlrover_run.events.recent import RecentEvents
from dlrover_run.exit_reasons import ExitReason
from dlrover_run.failures.causes import summarize_error
from dlrover_run.failures.guard import guarded
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.output.relay_client import RelayClient
from dlrover_run.output.run_directory import RunDir, make_temp_dir, remove_run_dir
from dlrover_run.processes import tree
from dlrover_run.rendezvous.backends import open_client
from dlrover_run.spec import JobSpec, SpecError


async def run_agent(
    job: JobSpec,
    run_dir: RunDir,
    parent_pipes: Sequence[int],
    relay: RelayClient,
    result_fd: int | None,
    program: str,
    make_adapter: AdapterFactory,
) -> int:
    """Run the job on this node, report, and return the exit code. `relay` has been started before there was a loop.
    `program` is the name of the launcher on the console. The result is written to `result_fd` if that is given."""
    began = time.monotonic()
    console = open_console(relay.write, job.console_name, program)
    relay.attach(console.info)
    # The relay is the last to end, so the directory goes even when watchdog and agent are killed together.
    run_dir = make_temp_dir(run_dir, relay.remove_at_end)
    agent: Agent | None = None
    log = open_event_log(job, run_dir, program, _print_from_thread(console))
    events = RecentEvents(log_opened(job, program), log)
    try:
        agent = Agent(job, run_dir, relay, parent_pipes, console, partial(open_client, job), make_adapter, events)
    except SpecError as mistake:
        # Only what is loaded for a backend shows whether it can be, and nothing has begun yet.
        reason, code = ExitReason.BAD_COMMAND_LINE, exit_codes.BAD_COMMAND_LINE
        result = JobResult(code, reason, "the job was not begun", error=str(mistake))
    else:
        result = await agent.run()
    events.close()
    await asyncio.sleep(0)  # Its warning is printed before the result.
    if not run_dir.keep:
        result = _without_paths(result)
    _print_result(job, result, console)
    # Where a person looks. A program that reads the output of a job that succeeds finds nothing of the launcher in it.
    if result.exit_reason is ExitReason.SUCCESS and result.speaks_for_job and (os.isatty(2) or is_verbose(os.environ)):
        console.info(render_success(time.monotonic() - began, result.restarts))
    await relay.drain(timeout=None)
    await relay.close()
    tree.end_children(set() if agent is None else agent.pids_to_spare)
    remove_run_dir(run_dir)
    if result_fd is not None:
        # The process that reads the result may have ended, and that may be why this node ends.
        with contextlib.suppress(BrokenPipeError), open(result_fd, "wb") as file:
            file.write(launch_request.encode(result))
    if agent is not None:
        agent.collect_masters()
    return result.exit_code


def _print_from_thread(console: Console) -> Callable[[str], None]:
    """A function that prints a line from another thread, as long as the loop of this one runs."""
    loop = asyncio.get_running_loop()

    def show(text: str) -> None:
        with contextlib.suppress(RuntimeError):  # The loop has been closed, and the console with it.
            loop.call_soon_threadsafe(console.info, text)

    return show


def _without_paths(result: JobResult) -> JobResult:
    """The result without paths into a directory that is removed with the job."""
    ends = tuple(replace(end, error_file=None) for end in result.ends)
    return replace(result, ends=ends, root=result.root and replace(result.root, error_file=None))


def _hint(job: JobSpec, root: WorkerExit | None) -> str:
    from dlrover_run.failures.other_environment import explain_missing_module

    error = None if root is None else summarize_error(root)
    return explain_missing_module(error, job.entrypoint.python, os.environ) or ""


def _print_result(job: JobSpec, result: JobResult, console: Console) -> None:
    if result.error is not None:
        console.error(result.error, timed=result.exit_code != exit_codes.BAD_COMMAND_LINE)
    if result.warning is not None:
        console.info(result.warning)
    root = result.root or result.failure
    if root is None:
        return
    from dlrover_run.console.failure_report import FailureReport, render_failure, render_remote_failure

    # No other node prints the report of a failure of this one, whatever the coordinator knows of it.
    if isinstance(root, Failure) and not result.failed_here and not is_verbose(os.environ):
        console.error(render_remote_failure(result.reason, root, result.exit_code))
        return

    report = FailureReport(
        job=job.entrypoint.target,
        host=display_name(job),
        root=root,
        ends=result.ends,
        restarts=result.restarts,
        # A job without rounds has a limit for each role.
        max_restarts=None if job.rules.engine else job.rules.max_restarts,
        exit_code=result.exit_code,
        why_over=result.why_over,
        hint=guarded("the environment of the workers", lambda: _hint(job, result.root), ""),
    )
    plain = f"the job failed: {result.reason}; this launcher exits with code {result.exit_code}"
    console.print(guarded("the failure report", lambda: render_failure(report, console.width, console.color), plain))
