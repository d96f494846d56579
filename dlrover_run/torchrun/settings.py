"""What torchrun hands to a rendezvous, read by the grammar of our own command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from dlrover_run import cli
from dlrover_run.command_line import credentials, meeting
from dlrover_run.launch_config import LaunchConfig
from dlrover_run.spec import JobSpec

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

RESTARTS = 1_000_000
"""How often the job may restart: always, for each torchrun keeps a count of its own and leaves when it has run out."""

_VARIABLES = (*meeting.RANK_VARIABLES, *meeting.ID_VARIABLES, meeting.MASTER_VARIABLE, *credentials.VARIABLES)


def job_spec(params: RendezvousParameters, warn: Callable[[str], None]) -> JobSpec:
    """The job of one node as the board and the coordinator need it; its workers are torchrun's business.

    The secrets leave this process's environment, which torchrun copies for its workers. Raises SpecError.
    """
    config = LaunchConfig(
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        # torchrun finds out by itself how many workers each node has.
        nproc_per_node=1,
        run_id=params.run_id,
        rdzv_endpoint=params.endpoint,
        rdzv_backend="master",
        rdzv_configs=params.config,
        max_restarts=RESTARTS,
        local_addr=params.local_addr,
    )
    environ = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    try:
        spec = cli.parse([*config.flags(), "--no-python", sys.executable], environ, warn=warn)
    finally:
        credentials.scrub_environment()
    # How often is too often is for each torchrun to say.
    return replace(spec, rules=replace(spec.rules, restart_window=0.0, early_failure_limit=0))
