"""What a task is told of its cluster: `TF_CONFIG`, and the variables beside it.

TensorFlow's own parsers decide what the cluster may look like. A list must be dense, for a task of index 1 in a list of
one is an error; a dict by index is taken everywhere, but not by scripts that look at `cluster["worker"][0]`. The
evaluator is never listed: `ParameterServerStrategy` waits for ever for one that is (tensorflow#46169).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dlrover_run.policies.parameter_servers.model import NodeOrder, Role, Task

GATE = "TF_PS_GATE"
"""The variable that has the bootstrap keep a worker from a session until the chief has a whole model."""

Listed = Mapping[str, Sequence[str] | Mapping[str, str]]


def servers_of(order: NodeOrder, task: Task) -> tuple[str, ...]:
    """The addresses of the servers of the task's version, by rank; empty for a version that the order knows nothing of.
    An evaluator reads checkpoints, and is of no version: it may be older."""
    if task.version == order.version or task.role is Role.EVALUATOR:
        return order.servers
    return order.next_servers if task.version == order.version + 1 else ()


def listed(order: NodeOrder, task: Task, sparse: bool, gaps: bool = False) -> Listed | None:
    """The cluster of a task as `TF_CONFIG` has it; None while an address is not known that it needs.

    With `sparse` that is its own, the chief's and the servers'. In a dense list the place of a worker is empty that is
    being replaced, or that has succeeded and has left its place to nobody. The first is known within moments; with
    `gaps` it is waited for no more, and the chief's address stands there, where nobody answers for that index.
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
    """The value of `TF_CONFIG`; None while an address is not known that it needs (see `listed`)."""
    cluster = listed(order, task, sparse, gaps)
    if cluster is None:
        return None
    config: dict[str, Any] = {"cluster": cluster, "task": {"type": task.role.value, "index": task.rank}}
    return json.dumps(config)


def task_variables(order: NodeOrder, task: Task, config: str, master: str) -> dict[str, str]:
    """What a task finds in its environment of its place in the cluster: `config` as its `TF_CONFIG`, and the names that
    pods of DLRover have. `master` is where the job's nodes meet, empty where one node has nobody to meet."""
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
    """How many tasks there are of that role."""
    if task.role is Role.PS:
        return len(servers_of(order, task))
    return len(order.workers) if task.role is Role.WORKER else 1
