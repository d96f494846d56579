"""The description of the cluster in a task's environment: `TF_CONFIG` and the variables beside it.

TensorFlow's own parsers determine the form of the cluster. A list must be dense, since index 1 in a list of one task is
an error; a dict by index is accepted by every parser, but not by scripts that read `cluster["worker"][0]`. The
evaluator is never listed: `ParameterServerStrategy` waits for a listed one forever (tensorflow#46169).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dlrover_run.policies.parameter_servers.model import NodeOrder, Role, Task

GATE = "TF_PS_GATE"
"""The variable that makes the bootstrap delay a worker's session until the chief has restored the model."""

Listed = Mapping[str, Sequence[str] | Mapping[str, str]]


def servers_of(order: NodeOrder, task: Task) -> tuple[str, ...]:
    """The addresses of the servers of the task's version, by rank; empty for a version that the order does not contain.
    An evaluator reads checkpoints and belongs to no version: it may be older."""
    if task.version == order.version or task.role is Role.EVALUATOR:
        return order.servers
    return order.next_servers if task.version == order.version + 1 else ()


def listed(order: NodeOrder, task: Task, sparse: bool, gaps: bool = False) -> Listed | None:
    """The cluster of a task for `TF_CONFIG`; None while an address that it needs is unknown.

    With `sparse` it contains the task itself, the chief and the servers. In a dense list the entry of a worker is empty
    while the worker is being replaced, or after it has succeeded without a successor. A replacement's address is known
    within moments; with `gaps` it is not waited for, and the entry has the chief's address, where no task answers for
    that index.
    """
    servers = servers_of(order, task)
    if not servers or not all(servers) or not order.chief or not task.port:
        return None
    if sparse:
        cluster: dict[str, Mapping[str, str]] = {"chief": {"0": order.chief}}
        if task.role is Role.WORKER:
            cluster["worker"] = {str(task.rank): task.endpoint}
        cluster["ps"] = {str(rank): address for rank, address in enumerate(servers)}
        return cluster
    if not (gaps or all(order.workers)):
        return None
    workers = [address or order.chief for address in order.workers]
    return {"chief": [order.chief], **({"worker": workers} if workers else {}), "ps": list(servers)}


def tf_config(order: NodeOrder, task: Task, sparse: bool, gaps: bool = False) -> str | None:
    """The value of `TF_CONFIG`; None while an address that it needs is unknown (see `listed`)."""
    cluster = listed(order, task, sparse, gaps)
    if cluster is None:
        return None
    config: dict[str, Any] = {"cluster": cluster, "task": {"type": task.role.value, "index": task.rank}}
    return json.dumps(config)


def task_variables(order: NodeOrder, task: Task, config: str, master: str) -> dict[str, str]:
    """The variables that describe the cluster to a task: `config` as its `TF_CONFIG`, and the names that
    pods of DLRover have. `master` is the endpoint of the job, empty for a single node."""
    return {
        "TF_CONFIG": config,
        "WORKER_TYPE": task.role.value,
        "WORKER_ID": str(task.key.id),
        "WORKER_RANK": str(task.rank),
        "WORKER_NUM": str(_number(order, task)),
        "DLROVER_MASTER_ADDR": master,
        "TF_PS_VERSION": str(task.version),
        GATE: "1",
    }


def _number(order: NodeOrder, task: Task) -> int:
    """The number of tasks with the role of a task."""
    if task.role is Role.PS:
        return len(servers_of(order, task))
    return len(order.workers) if task.role is Role.WORKER else 1
