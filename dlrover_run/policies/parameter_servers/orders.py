"""What of a cluster each node is told: a pure function of the plan, the same for all who read it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from dlrover_run.coordination.records import OVER, NodeKey, Plan
from dlrover_run.policies.parameter_servers.model import Cluster, NodeOrder, Role, Stage, Task

OPEN = frozenset({Stage.TRAINING, Stage.CHANGING, Stage.ENDING})
"""The stages in which workers are let in, or may stay."""


def orders(plan: Plan) -> dict[NodeKey, NodeOrder]:
    """The order of each node that hosts a task, or that has one of before to end; a node without one hosts nothing.

    Whatever a node hosts besides its order it ends. Nobody has one once the job is over.
    """
    cluster = plan.cluster
    if cluster is None or plan.phase in OVER:
        return {}
    told = _told(cluster)
    by_node: dict[NodeKey, list[Task]] = {member.key: [] for member in plan.members}
    for task in (*cluster.tasks, *cluster.next_servers):
        by_node.setdefault(host_of(task), []).append(task)
    return {
        key: msgspec.structs.replace(told, tasks=tuple(sorted(tasks, key=lambda task: task.key)))
        for key, tasks in by_node.items()
    }


def order(plan: Plan, key: NodeKey) -> NodeOrder | None:
    """The order of one node, or None for one that hosts nothing."""
    return orders(plan).get(key)


def host_of(task: Task) -> NodeKey:
    """The node that hosts the task."""
    return NodeKey(task.node_id, task.incarnation)


def _told(cluster: Cluster) -> NodeOrder:
    """What all nodes are told alike."""
    known = cluster.ports_held_at is not None
    chief = next((task for task in cluster.tasks if known and task.role is Role.CHIEF), None)
    return NodeOrder(
        version=cluster.version,
        servers=addresses(cluster.tasks, Role.PS) if known else (),
        next_servers=addresses(cluster.next_servers, Role.PS) if cluster.next_ports_held_at is not None else (),
        chief=chief.endpoint if chief is not None and chief.port else "",
        workers=addresses(cluster.tasks, Role.WORKER) if known else (),
        open=cluster.stage in OPEN and cluster.opened_at is not None,
        pause=cluster.stage in (Stage.PAUSING, Stage.SAVING),
        save=cluster.stage is Stage.SAVING,
        ending=cluster.stage is Stage.ENDING,
        queue_endpoint=chief.queue_endpoint if chief is not None else "",
        queue_key=chief.queue_key if chief is not None else "",
    )


def addresses(tasks: Iterable[Task], role: Role) -> tuple[str, ...]:
    """HOST:PORT of each rank of the role, empty for a rank that has no task now, or whose port is not known yet."""
    found = {task.rank: task.endpoint if task.port else "" for task in tasks if task.role is role}
    return tuple(found.get(rank, "") for rank in range(max(found, default=-1) + 1))
