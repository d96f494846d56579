"""How a version comes to train: ports are held, servers answer, the chief has a model, and the workers are let in."""

from __future__ import annotations

import msgspec

from dlrover_run.coordination.decision import changed
from dlrover_run.coordination.records import Plan
from dlrover_run.policies.parameter_servers.model import Cluster, Role, Stage, Task, TaskStage
from dlrover_run.policies.parameter_servers.orders import host_of
from dlrover_run.policies.parameter_servers.text import began
from dlrover_run.policies.parameter_servers.versions import fail
from dlrover_run.policies.parameter_servers.view import ClusterView, leftovers, tasks_of


def note_ports(scene: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """The plan with the addresses that have become known. A chief may start only once none of before is left, for two
    would write the same checkpoints."""
    chief_is_left = any(key is None or key.role is Role.CHIEF for _, key in leftovers(scene, plan, cluster))
    tasks = tuple(_held(scene, task, chief_is_left) for task in cluster.tasks)
    coming = tuple(_held(scene, task, chief_is_left) for task in cluster.next_servers)
    noted = msgspec.structs.replace(cluster, tasks=tasks, next_servers=coming)
    listed = [task for task in tasks if task.role is not Role.EVALUATOR]
    if cluster.ports_held_at is None and tasks_of(noted, Role.CHIEF) and all(task.port for task in listed):
        noted = msgspec.structs.replace(noted, ports_held_at=scene.now)
    if cluster.next_ports_held_at is None and coming and all(task.port for task in coming):
        noted = msgspec.structs.replace(noted, next_ports_held_at=scene.now)
    return None if noted == cluster else changed(plan, scene.now, cluster=noted)


def let_in(scene: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """The plan once all servers answer; and once the chief has a whole model, and no process is left that could train
    with another version."""
    if cluster.stage is not Stage.STARTING or not all(scene.ready(task) for task in tasks_of(cluster, Role.PS)):
        return None
    if cluster.servers_ready_at is None:
        return changed(plan, scene.now, cluster=msgspec.structs.replace(cluster, servers_ready_at=scene.now))
    chief = next((task for task in tasks_of(cluster, Role.CHIEF) if scene.ready(task)), None)
    if chief is None:
        return None
    left = leftovers(scene, plan, cluster)
    if left:
        deadline = fence_deadline(scene, cluster)
        if deadline is None or scene.now < deadline:
            return None
        node, key = left[0]
        words = f"{key or 'a process'} of before on {scene.present[node].status.host} does not end"
        return fail(scene, plan, cluster, f"{plan.reason}; {words}, so nobody may train")
    told = scene.told(chief)
    restored, reached = (told.restored, told.reached) if told is not None else (-1, -1)
    reason = f"{plan.reason}{began(restored, max(cluster.step, reached), cluster.paused)}"
    opened = msgspec.structs.replace(
        cluster,
        stage=Stage.TRAINING,
        since=scene.now,
        opened_at=scene.now,
        step=restored,
        saved=restored,
        proven_servers=len(tasks_of(cluster, Role.PS)),
    )
    return changed(plan, scene.now, cluster=opened, reason=reason)


def fence_deadline(scene: ClusterView, cluster: Cluster) -> float | None:
    """Until when the end of processes of before is waited for: as long as a chief has, and as long again."""
    if cluster.stage is not Stage.STARTING or cluster.servers_ready_at is None:
        return None
    given = max((task.since for task in tasks_of(cluster, Role.CHIEF)), default=cluster.servers_ready_at)
    return max(cluster.servers_ready_at, given) + 2 * scene.limits.ready_timeout


def _held(scene: ClusterView, task: Task, chief_is_left: bool) -> Task:
    told = scene.told(task)
    if task.port or told is None or not told.port or told.stage is TaskStage.ENDED:
        return task
    if task.role is Role.CHIEF and chief_is_left:
        return task
    address = scene.present[host_of(task)].status.address
    return msgspec.structs.replace(
        task, address=address, port=told.port, queue_port=told.queue_port, queue_key=told.queue_key
    )
