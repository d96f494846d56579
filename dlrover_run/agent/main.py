"""The agent process from its first line to its verdict, with what it shows to the person at the console."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace

from dlrover_run import exit_codes
from dlrover_run.agent.host import display_name
from dlrover_run.agent.loop import Agent
from dlrover_run.agent.progress_reporter import is_verbose
from dlrover_run.agent.result import JobResult
from dlrover_run.console.console import Console, open_console
from dlrover_run.coordination.model import Failure
from dlrover_run.output.relay_client import RelayClient
from dlrover_run.output.streams import RunDir, make_temp_dir, remove_run_dir
from dlrover_run.process_tree import tree
from dlrover_run.rendezvous.backends import open_client
from dlrover_run.spec import JobSpec, SpecError


async def run_agent(
    spec: JobSpec, run_dir: RunDir, parent_pipes: Sequence[int], relay: RelayClient, verdict_fd: int | None
) -> int:
    """Run the job on this node, report, and return the exit code. `relay` has been started before there was a loop."""
    console = open_console(relay.write, spec.console_name)
    relay.attach(console.info)
    # The relay is the last to end, so the directory goes even when watchdog and agent are killed together.
    run_dir = make_temp_dir(run_dir, relay.remove_at_end)
    try:
        agent = Agent(
            spec, run_dir, relay, parent_pipes, console, lambda listener: open_client(spec, listener, console.info)
        )
    except SpecError as mistake:
        # Only what is loaded for a backend shows whether it can be, and nothing has begun yet.
        verdict = JobResult(exit_codes.BAD_COMMAND_LINE, "the job was not begun", error=str(mistake))
        pids_to_spare: set[int] = set()
    else:
        verdict = await agent.run()
        pids_to_spare = agent.pids_to_spare
    if not run_dir.keep:
        verdict = _without_paths(verdict)
    _tell(spec, verdict, console)
    await relay.drain(timeout=None)
    await relay.close()
    tree.end_children(pids_to_spare)
    remove_run_dir(run_dir)
    if verdict_fd is not None:
        import msgspec

        # Whoever wanted to know may have gone, and that is why this node ends.
        with contextlib.suppress(BrokenPipeError), open(verdict_fd, "wb") as file:
            file.write(msgspec.json.encode(verdict))
    return verdict.exit_code


def _without_paths(verdict: JobResult) -> JobResult:
    """The verdict without paths into a directory that is removed with the job: nobody could open them."""
    ends = tuple(replace(end, error_file=None) for end in verdict.ends)
    return replace(verdict, ends=ends, root=verdict.root and replace(verdict.root, error_file=None))


def _tell(spec: JobSpec, verdict: JobResult, console: Console) -> None:
    if verdict.error is not None:
        console.error(verdict.error, timed=verdict.exit_code != exit_codes.BAD_COMMAND_LINE)
    root = verdict.root or verdict.failure
    if root is None:
        return
    from dlrover_run.console.failure_report import FailureReport, render_failure, render_remote_failure

    if isinstance(root, Failure) and not is_verbose(os.environ):
        console.error(render_remote_failure(verdict.reason, root, verdict.exit_code))
        return

    report = FailureReport(
        job=spec.entrypoint.target,
        host=display_name(spec),
        root=root,
        ends=verdict.ends,
        restarts=verdict.restarts,
        max_restarts=spec.rules.max_restarts,
        exit_code=verdict.exit_code,
        why_over=verdict.why_over,
    )
    console.print(render_failure(report, console.width, console.color))
