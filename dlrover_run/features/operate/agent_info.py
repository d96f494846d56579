"""What an agent says of itself to an operator's command on its machine. Imported with the first question."""

from __future__ import annotations

import os
import shlex
import time

from dlrover_run.agent.host import launcher_pid
from dlrover_run.agent.node_state import NodeState
from dlrover_run.features.operate.protocol import MAX_SCRIPT, AgentInfo
from dlrover_run.spec import JobSpec


def agent_info(job: JobSpec, node: NodeState, log: str, began: float) -> AgentInfo:
    """The agent of this process, which began at that time of the monotonic clock; `log` is its event log."""
    return AgentInfo(
        job=job.display_name,
        program=job.rules.program,
        backend=job.rendezvous.backend,
        host=node.host,
        node_id=node.node_id,
        pid=os.getpid(),
        launcher=launcher_pid(job),
        script=_script(job),
        seconds=round(time.monotonic() - began, 3),
        endpoint=job.rendezvous.endpoint or job.endpoint,
        log=log,
    )


def _script(job: JobSpec) -> str:
    """What the workers run, as it was typed, without the directory of the script."""
    program = job.entrypoint
    return shlex.join((os.path.basename(program.target) or program.target, *program.args))[:MAX_SCRIPT]
