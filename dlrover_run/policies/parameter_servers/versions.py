"""The next version of a cluster: who is in it, and what it goes on from."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dlrover_run.coordination.decision import changed
from dlrover_run.coordination.records import Failure, Plan, PlanPhase, RoundKey
from dlrover_run.coordination.words import counted
from dlrover_run.policies.parameter_servers.model import Cluster, Role, Stage, Task, TaskStage
from dlrover_run.policies.parameter_servers.orders import host_of
from dlrover_run.policies.parameter_servers.placement import (
    Places,
    give,
    give_all,
    least_servers,
    place_one,
    places_of,
    rooms,
    spread,
    wanted_servers,
    wanted_workers,
)
from dlrover_run.policies.parameter_servers.rules import ClusterRules
from dlrover_run.policies.parameter_servers.text import replaced, servers
from dlrover_run.policies.parameter_servers.view import ClusterView, Loss, tasks_of


def begin_version(
    scene: ClusterView, plan: Plan, cluster: Cluster, why: str, rolled_back: bool, losses: Sequence[Loss] = ()
) -> Plan:
    """The plan in which the next version starts, or in which its nodes gather when there is no room for one.

    The servers that were coming take part, for nothing was ever stored in them. With `rolled_back` the model goes back
    to a checkpoint, so that workers which have succeeded are needed again.
    """
    number = max(plan.key.number, cluster.version) + 1
    cluster = _account(scene, cluster, rolled_back)
    cluster, coming = _next_servers(scene, cluster, number)
    chief_before = next((host_of(task) for task in tasks_of(cluster, Role.CHIEF)), None)
    workers_before = places_of(tasks_of(cluster, Role.WORKER))
    kept = tuple(task for task in tasks_of(cluster, Role.EVALUATOR) if _goes_on(scene, task))
    empty = msgspec.structs.replace(cluster, tasks=kept, next_servers=())
    short = _shortage(scene, empty, len(coming))
    if short:
        return _disband(scene, plan, cluster, f"{why}; {short}" if why else short)
    chief_place = place_one(scene, empty, Role.CHIEF, 0, chief_before)
    assert chief_place is not None, "there is room for a chief"
    cluster, chief = give(scene, empty, Role.CHIEF, 0, number, chief_place)
    places = spread(wanted_workers(scene.limits, cluster), rooms(scene, Role.WORKER), workers_before)
    cluster, workers = give_all(scene, cluster, Role.WORKER, places, number)
    tasks = (*coming, chief, *workers, *kept)
    successors = replaced(losses, coming)
    if successors and len(coming) > len(losses):
        successors += ", and all other processes are started again too"
    fewer = len(coming) < wanted_servers(scene.limits, cluster)
    left = f"there is room for {servers(len(coming))}" if fewer else ""
    reason = "; ".join(part for part in (f"version {number}: {why}", successors, left) if part)
    cluster = msgspec.structs.replace(_starting(scene, cluster, tasks), version=number)
    key = RoundKey(plan.epoch, number)
    return changed(
        plan,
        scene.now,
        phase=PlanPhase.TRAINING,
        since=scene.now,
        key=key,
        cluster=cluster,
        reason=reason,
        failure=None,
    )


def shortage(scene: ClusterView, cluster: Cluster) -> str:
    """What there is no room for that every version needs, in words; empty when there is room for the least of all."""
    return _shortage(scene, cluster, len(places_for_servers(scene, cluster)))


def places_for_servers(scene: ClusterView, cluster: Cluster) -> Places:
    """Where the servers of the next version would be: those that can stay where they are do."""
    current = tasks_of(cluster, Role.PS)
    before = {task.rank: host_of(task) for task in current if not scene.going(host_of(task))}
    return spread(range(wanted_servers(scene.limits, cluster)), rooms(scene, Role.PS), before)


def fail(scene: ClusterView, plan: Plan, cluster: Cluster, reason: str, loss: Loss | None = None) -> Plan:
    """The job ends, because of the end of a task if there is one."""
    failure = plan.failure
    if loss is not None:
        failure = Failure(loss.task.rank, loss.task.host, loss.end.what, trace=loss.end.trace)
    return changed(
        plan, scene.now, phase=PlanPhase.FAILED, since=scene.now, cluster=cluster, reason=reason, failure=failure
    )


def _account(scene: ClusterView, cluster: Cluster, rolled_back: bool) -> Cluster:
    """The cluster at the end of its version: how far it has come, and what the next one has not to answer for."""
    told = [status for task in cluster.tasks if (status := scene.told(task)) is not None]
    return msgspec.structs.replace(
        cluster,
        step=max([cluster.step, *(status.step for status in told)]),
        saved=max([cluster.saved, *(status.saved for status in told)]),
        succeeded_workers=() if rolled_back else cluster.succeeded_workers,
        # Nobody has trained in a version that was never opened.
        paused=not rolled_back or (cluster.paused and cluster.opened_at is None),
        # Others may have left because of a server.
        unexpected_exits=tuple(one for one in cluster.unexpected_exits if one.role is Role.PS),
    )


def _next_servers(scene: ClusterView, cluster: Cluster, number: int) -> tuple[Cluster, tuple[Task, ...]]:
    coming = cluster.next_servers
    lost = any(scene.loss(cluster, task) is not None or scene.going(host_of(task)) for task in coming)
    allowed = cluster.server_bounds is None or cluster.server_bounds.allow(len(coming))
    if coming and not lost and allowed and all(task.version == number for task in coming):
        return cluster, coming
    return give_all(scene, cluster, Role.PS, places_for_servers(scene, cluster), number)


def _starting(scene: ClusterView, cluster: Cluster, tasks: tuple[Task, ...]) -> Cluster:
    """The cluster with these tasks, of which nothing is known yet."""
    return msgspec.structs.replace(
        cluster,
        stage=Stage.STARTING,
        since=scene.now,
        until=None,
        tasks=tasks,
        next_servers=(),
        ports_held_at=None,
        servers_ready_at=None,
        opened_at=None,
        next_ports_held_at=None,
        insufficient_since=None,
    )


def _goes_on(scene: ClusterView, task: Task) -> bool:
    """Whether that evaluator is running: it reads checkpoints, and is of no version."""
    return scene.stage(task) in (TaskStage.STARTED, TaskStage.READY) and not scene.going(host_of(task))


def _shortage(scene: ClusterView, cluster: Cluster, ps: int) -> str:
    limits = scene.limits
    short = []
    least = least_servers(limits, cluster)
    if ps < least:
        exact = cluster.server_bounds is not None and cluster.server_bounds.most == least
        short.append(f"{ps} of {'exactly' if exact else 'at least'} {servers(least)}{_because(limits, cluster)}")
    if not sum(rooms(scene, Role.CHIEF).values()):
        short.append("no chief")
    workers = sum(rooms(scene, Role.WORKER).values())
    least = min(limits.min_workers, len(wanted_workers(limits, cluster)))
    if workers < least:
        short.append(f"{workers} of at least {least} workers")
    return f"there is room for {' and '.join(short)}" if short else ""


def _because(limits: ClusterRules, cluster: Cluster) -> str:
    """The table for which fewer servers than the job may have are not enough, in brackets."""
    bounds = cluster.server_bounds
    if bounds is None or bounds.least <= limits.min_ps:
        return ""
    return f" (the table {bounds.table!r} has {counted(bounds.parts, 'part')}, which another number would change)"


def _disband(scene: ClusterView, plan: Plan, cluster: Cluster, reason: str) -> Plan:
    """No version for now: all tasks are ended, and nodes are waited for."""
    cluster = _starting(scene, cluster, ())
    return changed(
        plan, scene.now, phase=PlanPhase.GATHERING, since=scene.now, cluster=cluster, reason=reason, failure=None
    )
