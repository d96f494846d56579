"""Puts the parts together: the watchdog of dlrover-run outside, the agent of this package inside."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from dlrover_run import launch as guarded
from dlrover_run.output.streams import RunDir
from dlrover_run.spec import JobSpec
from tf_ps_runner.spec import ServersSpec

if TYPE_CHECKING:
    from dlrover_run.output.relay_client import RelayClient

NAME = "tf-ps-run"
"""What begins the launcher's lines on the console."""

PROCESS = "tf-ps-agent"
"""What `top` calls the agent."""


def launch(spec: ServersSpec) -> int:
    """Run this node's part of a job and return the exit code of the launcher.

    This process becomes the watchdog, as with `dlrover_run.launch.launch`, which says what it must not have. Raises
    SpecError when the log directory cannot be used.
    """

    def agent() -> guarded.AgentMain:
        # Imported in the agent's process only: the watchdog needs none of it and stays small.
        from tf_ps_runner.agent.main import run_agent

        def run(
            _: JobSpec, run_dir: RunDir, parent_pipes: Sequence[int], relay: RelayClient, verdict: int | None
        ) -> Coroutine[Any, Any, int]:
            assert verdict is None, "nobody asks this launcher for more than its exit code"
            return run_agent(spec, run_dir, parent_pipes, relay)

        return run

    return guarded.launch(spec.job, program=guarded.Program(NAME, PROCESS, agent))
