"""Starts the launcher: the watchdog and the agent of dlrover-run with the adapter of this package."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dlrover_run import launch as launcher
from tf_ps_runner.spec import PsJobSpec

if TYPE_CHECKING:
    from dlrover_run.agent.framework import AdapterFactory


def launch(spec: PsJobSpec) -> int:
    """Run this node's part of a job and return the exit code of the launcher.

    This process becomes the watchdog, as with `dlrover_run.launch.launch`, which documents its restrictions. Raises
    SpecError when the log directory cannot be used.
    """

    def load_adapter() -> AdapterFactory:
        # Imported only in the agent's process, so that the watchdog stays small.
        from tf_ps_runner.agent.adapter import TensorFlowAdapter

        return partial(TensorFlowAdapter, spec)

    return launcher.launch(spec.job, program=launcher.LauncherProgram("tf-ps-run", "tf-ps-agent", load_adapter))
