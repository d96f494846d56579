"""Whether a node can be drained without ending the training of the others. Pure."""

from __future__ import annotations

from dlrover_run.job_status.status import (
    JobState,
    JobStatus,
    NodeCondition,
    NodeStatus,
)
from dlrover_run.words.text import counted

_TRAINS_ON = frozenset({NodeCondition.TRAINING, NodeCondition.STARTING, NodeCondition.SPARE, NodeCondition.WAITING})


def named(status: JobStatus, name: str) -> list[NodeStatus]:
    """The nodes that have this rank, host or id."""
    ranked = [node for node in status.nodes if node.node is not None and str(node.node) == name]
    return ranked or [node for node in status.nodes if name in (node.host, node.node_id)]


def drain_problem(status: JobStatus, name: str) -> str | None:
    """Why the job could not train without the node of this name, a clause; None if it can."""
    leaving = {node.node_id for node in named(status, name)}
    if not leaving or status.max_restarts is None or status.state is not JobState.TRAINING:
        # Without ranks the tasks move to other nodes.
        return None
    left = sum(node.state in _TRAINS_ON and node.node_id not in leaving for node in status.nodes)
    if left + status.nodes_omitted >= status.min_nodes:
        return None
    least = counted(status.min_nodes, "node")
    return f"the job needs at least {least} and would have {left}; it would wait for another one"
