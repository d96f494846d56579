"""The agent process from its first line to its verdict, with what it shows to the person at the console."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from dlrover_run import exit_codes
from dlrover_run.agent.host import display_name
from dlrover_run.agent.progress_reporter import is_verbose
from dlrover_run.console.console import Console, open_console
from dlrover_run.coordination.model import Failure
from dlrover_run.output.relay_client import RelayClient
from dlrover_run.output.streams import RunDir, make_temp_dir, remove_run_dir
from dlrover_run.process_tree import tree
from dlrover_run.rendezvous.backends import open_client
from dlrover_run.spec import SpecError
from tf_ps_runner.agent.loop import Agent
from tf_ps_runner.agent.report import JobResult
from tf_ps_runner.spec import PsJobSpec


async def run_agent(spec: PsJobSpec, run_dir: RunDir, parent_pipes: Sequence[int], relay: RelayClient) -> int:
    """Run the job on this node, report, and return the exit code. `relay` has been started before there was a loop."""
    job = spec.job
    console = open_console(relay.write, job.console_name, "tf-ps-run")
    relay.attach(console.info)
    # The relay is the last to end, so the directory goes even when watchdog and agent are killed together.
    run_dir = make_temp_dir(run_dir, relay.remove_at_end)
    pids_to_spare: set[int] = set()
    try:
        agent = Agent(spec, run_dir, relay, parent_pipes, console, partial(open_client, job))
    except SpecError as mistake:
        # Only what is loaded for a backend shows whether it can be, and nothing has begun yet.
        verdict = JobResult(exit_codes.BAD_COMMAND_LINE, "the job was not begun", error=str(mistake))
    else:
        verdict = await agent.run()
        pids_to_spare = agent.pids_to_spare
    _tell(spec, verdict, console)
    await relay.drain(timeout=None)
    await relay.close()
    tree.end_children(pids_to_spare)
    remove_run_dir(run_dir)
    return verdict.exit_code


def _tell(spec: PsJobSpec, verdict: JobResult, console: Console) -> None:
    if verdict.error is not None:
        console.error(verdict.error, timed=verdict.exit_code != exit_codes.BAD_COMMAND_LINE)
    if verdict.warning is not None:
        console.info(verdict.warning)
    root = verdict.root or verdict.failure
    if root is None:
        return
    from dlrover_run.console.failure_report import FailureReport, render_failure, render_remote_failure

    # The coordinator may describe a task of this node in other words than the node did; no other node reports it.
    own = isinstance(root, Failure) and root.host == display_name(spec.job)
    if isinstance(root, Failure) and not own and not is_verbose(os.environ):
        console.error(render_remote_failure(verdict.reason, root, verdict.exit_code))
        return

    report = FailureReport(
        job=spec.job.entrypoint.target,
        host=display_name(spec.job),
        root=root,
        ends=(),
        restarts=0,
        max_restarts=None,
        exit_code=verdict.exit_code,
        why_over=verdict.why_over,
    )
    console.print(render_failure(report, console.width, console.color))
