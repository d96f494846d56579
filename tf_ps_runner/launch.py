"""Starts the launcher: the watchdog of dlrover-run with the agent of this package."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from dlrover_run import launch as launcher
from dlrover_run.output.streams import RunDir
from dlrover_run.spec import JobSpec
from tf_ps_runner.spec import PsJobSpec

if TYPE_CHECKING:
    from dlrover_run.output.relay_client import RelayClient


def launch(spec: PsJobSpec) -> int:
    """Run this node's part of a job and return the exit code of the launcher.

    This process becomes the watchdog, as with `dlrover_run.launch.launch`, which documents its restrictions. Raises
    SpecError when the log directory cannot be used.
    """

    def agent() -> launcher.AgentMain:
        # Imported only in the agent's process, so that the watchdog stays small.
        from tf_ps_runner.agent.main import run_agent

        def run(
            _: JobSpec, run_dir: RunDir, parent_pipes: Sequence[int], relay: RelayClient, verdict: int | None
        ) -> Coroutine[Any, Any, int]:
            assert verdict is None, "the callers of this launcher only read its exit code"
            return run_agent(spec, run_dir, parent_pipes, relay)

        return run

    return launcher.launch(spec.job, program=launcher.Program("tf-ps-run", "tf-ps-agent", agent))
