"""The agent process from its first line to its verdict, with what it shows to the person at the console."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from ..spec import JobSpec
from . import failures
from .loop import Agent
from .relay_client import Relay
from .verdict import Verdict


async def run_agent(
    spec: JobSpec, run_dir: str | None, lifelines: Sequence[int], relay: Relay, verdict_fd: int | None
) -> int:
    """Run the job on this node, report, and return the exit code. `relay` has been started before there was a loop."""
    relay.attach(_say)
    try:
        verdict = await Agent(spec, run_dir, relay, lifelines, _say).run()
    finally:
        await relay.close()
    _tell(spec, verdict)
    if verdict.root is not None and (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        failures.copy_root_cause(verdict.root, path)
    if verdict_fd is not None:
        import msgspec

        with open(verdict_fd, "wb") as file:
            file.write(msgspec.json.encode(verdict))
    return verdict.exit_code


def _say(line: str) -> None:
    print(f"dlrover-run: {line}", file=sys.stderr, flush=True)


def _tell(spec: JobSpec, verdict: Verdict) -> None:
    if verdict.error is not None:
        _say(verdict.error)
