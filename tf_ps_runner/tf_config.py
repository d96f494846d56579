"""The description of the cluster in a task's environment: `TF_CONFIG` and the variables beside it.

TensorFlow's own parsers determine the form of the cluster. A list must be dense, since index 1 in a list of one task is
an error; a dict by index is accepted by every parser, but not by scripts that read `cluster["worker"][0]`. The
evaluator is never listed: `ParameterServerStrategy` waits for a listed one forever (tensorflow#46169).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tf_ps_runner.cluster.model import PlannedTask, Role
from tf_ps_runner.cluster.orders import NodeOrder
from tf_ps_runner.cluster.rules import ROLES

GATE = "TF_PS_GATE"
"""The variable that makes the bootstrap delay a worker's session until the chief has restored the model."""

READY_AT_START = "TF_PS_READY_AT_START"
"""The variable of a task that counts as ready as soon as its script begins, since it waits for no other task."""


def servers_of(order: NodeOrder, task: PlannedTask) -> tuple[str, ...]:
    """The addresses of the servers of the task's version, by rank; empty for a version that the order does not contain.
    A task that outlives versions, such as an evaluator, may be older."""
    if task.version == order.version or ROLES[task.role].outlives_versions:
        return order.servers
    return order.next_servers if task.version == order.version + 1 else ()


def tf_config(order: NodeOrder, task: PlannedTask, sparse: bool, gaps: bool = False) -> str | None:
    """The value of `TF_CONFIG`; None while an address that it needs is unknown.

    With `sparse` the cluster contains the task itself, the chief and the servers. In a dense list the entry of a worker
    is empty while the worker is being replaced, or after it has succeeded without a successor. A replacement's address
    is known within moments; with `gaps` it is not waited for, and the entry has the chief's address, where no task
    answers for that index.
    """
    servers = servers_of(order, task)
    if not servers or not all(servers) or not order.chief or not task.port:
        return None
    cluster: dict[str, Sequence[str] | Mapping[str, str]]
    if sparse:
        cluster = {"chief": {"0": order.chief}}
        if task.role is Role.WORKER:
            cluster["worker"] = {str(task.rank): task.endpoint}
        cluster["ps"] = {str(rank): address for rank, address in enumerate(servers)}
    elif gaps or all(order.workers):
        workers = [address or order.chief for address in order.workers]
        cluster = {"chief": [order.chief], **({"worker": workers} if workers else {}), "ps": list(servers)}
    else:
        return None
    return json.dumps({"cluster": cluster, "task": {"type": task.role.value, "index": task.rank}})


PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""The variables for whose proxy TensorFlow's gRPC asks to connect it to other tasks, too. Names in capitals have no
effect there."""

NO_PROXY_VARIABLES = ("no_grpc_proxy", "no_proxy")
"""The variables that name the hosts that are reached without a proxy. gRPC reads the first of them that is set."""


def proxy_exceptions(order: NodeOrder, task: PlannedTask, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that make a task reach the others of its cluster without the proxy of `environment`, which has no
    way to them: TensorFlow would wait for ever, without a word. Nothing where no proxy is set."""
    if not any(environment.get(name) for name in PROXY_VARIABLES):
        return {}
    addresses = filter(None, (*servers_of(order, task), order.chief, *order.workers, task.endpoint))
    hosts = list(dict.fromkeys(address.rpartition(":")[0].strip("[]") for address in addresses))
    changed = {}
    for name in NO_PROXY_VARIABLES:
        given = environment.get(name)
        if given is None and name == "no_grpc_proxy":
            # Without it gRPC reads the other one.
            continue
        # Python reads the name in capitals only where the other one is not set.
        before = environment.get(name.upper(), "") if given is None else given
        named = [entry.strip() for entry in before.split(",") if entry.strip()]
        changed[name] = ",".join([*named, *(host for host in hosts if host not in named)])
    return changed


def task_variables(order: NodeOrder, task: PlannedTask, config: str, master: str) -> dict[str, str]:
    """The variables that describe the cluster to a task: `config` as its `TF_CONFIG`, and those that DLRover sets in
    its pods. `master` is the endpoint of the job, empty for a single node."""
    replicas = 1
    if task.role is Role.PS:
        replicas = len(servers_of(order, task))
    elif task.role is Role.WORKER:
        replicas = len(order.workers)
    return {
        "TF_CONFIG": config,
        "WORKER_TYPE": task.role.value,
        "WORKER_ID": str(task.key.id),
        "WORKER_RANK": str(task.rank),
        "WORKER_NUM": str(replicas),
        "DLROVER_MASTER_ADDR": master,
        "TF_PS_VERSION": str(task.version),
        GATE: "1",
        READY_AT_START: str(int(ROLES[task.role].ready_after is None)),
    }
