"""The agent process from its first line to its verdict, with what it shows to the person at the console."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace

from ..spec import JobSpec
from .loop import Agent
from .relay_client import Relay
from .streams import RunDir
from .verdict import Verdict


async def run_agent(
    spec: JobSpec, run_dir: RunDir, lifelines: Sequence[int], relay: Relay, verdict_fd: int | None
) -> int:
    """Run the job on this node, report, and return the exit code. `relay` has been started before there was a loop."""
    relay.attach(_say)
    verdict = await Agent(spec, run_dir, relay, lifelines, _say).run()
    _tell(spec, verdict if run_dir.keep else _without_paths(verdict))
    if verdict_fd is not None:
        import msgspec

        with open(verdict_fd, "wb") as file:
            file.write(msgspec.json.encode(verdict))
    return verdict.exit_code


def _without_paths(verdict: Verdict) -> Verdict:
    """The verdict without paths into a directory that is removed with the job: nobody could open them."""
    ends = tuple(replace(end, error_file=None) for end in verdict.ends)
    return replace(verdict, ends=ends)


def _say(line: str) -> None:
    print(f"dlrover-run: {line}", file=sys.stderr, flush=True)


def _tell(spec: JobSpec, verdict: Verdict) -> None:
    if verdict.error is not None:
        _say(verdict.error)
    if verdict.root is None:
        return
    from ..console.report import FailureReport, render_failure

    report = FailureReport(
        job=spec.entrypoint.target,
        host=socket.gethostname(),
        ends=verdict.ends,
        restarts=verdict.restarts,
        max_restarts=spec.max_restarts,
        exit_code=verdict.exit_code,
        reason=verdict.reason,
    )
    color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else 80
    print(render_failure(report, width, color), file=sys.stderr, flush=True)
