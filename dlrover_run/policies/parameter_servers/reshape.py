"""A planned change of the servers: the next ones are started beside the old ones, then all pause, the chief saves, and
the next version goes on from there."""

from __future__ import annotations

import msgspec

from dlrover_run.coordination.decision import changed
from dlrover_run.coordination.records import Plan
from dlrover_run.coordination.words import names
from dlrover_run.policies.parameter_servers.budgets import (
    charge_one_of,
    limit_of,
    may_try_servers,
    more_memory,
    raise_limit,
    spent_of,
    with_spent,
)
from dlrover_run.policies.parameter_servers.model import Cluster, EndCause, Role, Stage, Task, TaskStage
from dlrover_run.policies.parameter_servers.orders import host_of
from dlrover_run.policies.parameter_servers.placement import Places, give_all, least_servers, rooms, wanted_servers
from dlrover_run.policies.parameter_servers.text import ended, named, servers, size
from dlrover_run.policies.parameter_servers.versions import begin_version, places_for_servers
from dlrover_run.policies.parameter_servers.view import ClusterView, leftovers, tasks_of


def change(scene: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """What follows for a planned change at its present stage."""
    if cluster.stage is Stage.TRAINING:
        return _swell(scene, plan, cluster) or _begin(scene, plan, cluster)
    if cluster.stage is Stage.CHANGING:
        return _prepare(scene, plan, cluster)
    if cluster.stage is Stage.PAUSING and not _workers_left(scene, plan, cluster):
        return changed(plan, scene.now, cluster=msgspec.structs.replace(cluster, stage=Stage.SAVING, since=scene.now))
    return None


def _workers_left(scene: ClusterView, plan: Plan, cluster: Cluster) -> bool:
    """Whether a worker may train still, be it one that was dismissed before."""
    dismissed = (key for _, key in leftovers(scene, plan, cluster))
    return bool(tasks_of(cluster, Role.WORKER)) or any(key is None or key.role is Role.WORKER for key in dismissed)


def conclude(scene: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """The next version, once the chief has saved and left, or when that took too long."""
    if cluster.stage not in (Stage.PAUSING, Stage.SAVING):
        return None
    # A chief whose workers serve it (ParameterServerStrategy) saves and leaves with them still there, for they train
    # nothing by themselves, and it could not finish its step without them.
    for chief in tasks_of(cluster, Role.CHIEF):
        loss, told = scene.loss(cluster, chief), scene.told(chief)
        if loss is None or loss.end.cause is not EndCause.RESHAPED:
            continue
        # One that was ended with its node before it had saved is a loss.
        if not loss.free or (told is not None and told.saved >= max(0, told.step)):
            saved = f"{chief.key} saved at step {told.saved}" if told is not None and told.saved >= 0 else ""
            return begin_version(scene, plan, cluster, _words(cluster, saved), rolled_back=False)
    if cluster.until is not None and scene.now >= cluster.until:
        if scene.broken(plan) is not None:
            return plan
        waited = names([str(task.key) for task in tasks_of(cluster, Role.WORKER)]) or "the chief"
        late = f"{waited} did not leave within {scene.limits.save_timeout:g} s, so what was not saved is lost"
        return begin_version(scene, plan, cluster, _words(cluster, late), rolled_back=True)
    return None


def _words(cluster: Cluster, how: str) -> str:
    before, after = len(tasks_of(cluster, Role.PS)), len(cluster.next_servers)
    number = f"{servers(after)} instead of {before}" if after != before else f"{servers(after)}, started anew"
    return f"{number}; {how}" if how else number


def _swell(scene: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """A server that is near its limit of memory gets more before it is killed for that."""
    limits = scene.limits
    for task in tasks_of(cluster, Role.PS):
        told = scene.told(task)
        if told is None or not told.near_memory_limit or not scene.ready(task):
            continue
        if (
            limit_of(limits, cluster, Role.PS, task.rank) > task.memory
            or more_memory(limits, task.memory) == task.memory
        ):
            continue
        spent = spent_of(cluster, Role.PS)
        if spent.memory >= limits.memory_restarts or not may_try_servers(limits, cluster):
            continue
        cluster = with_spent(cluster, msgspec.structs.replace(spent, memory=spent.memory + 1))
        cluster = raise_limit(limits, cluster, task)
        memory = limit_of(limits, cluster, Role.PS, task.rank)
        reason = f"{named(task)} is near its limit of {size(task.memory)}, and is to get {size(memory)}"
        return changed(plan, scene.now, cluster=cluster, reason=reason)
    return None


def _wanted(scene: ClusterView, cluster: Cluster) -> tuple[Places, str] | None:
    """Where the servers shall be, and why, when that is another thing than where they are and what they have."""
    current = tasks_of(cluster, Role.PS)
    places = places_for_servers(scene, cluster)
    if len(places) < least_servers(scene.limits, cluster):
        return None
    goal = wanted_servers(scene.limits, cluster)
    if len(places) > len(current) or goal < len(current):
        return places, f"{servers(len(places))} {'is' if len(places) == 1 else 'are'} wanted instead of {len(current)}"
    leaving = [task for task in current if scene.going(host_of(task))]
    if leaving:
        return places, names(list(dict.fromkeys(scene.departure(task) for task in leaving)))
    chiefs = [task for task in tasks_of(cluster, Role.CHIEF) if scene.going(host_of(task))]
    if chiefs and any(rooms(scene, Role.CHIEF).values()):
        # It saves before it goes: the queues of the data are on its node, and their state goes with the checkpoint.
        return places, f"{scene.departure(chiefs[0])}, and the chief moves"
    small = [task for task in current if task.memory < limit_of(scene.limits, cluster, Role.PS, task.rank)]
    if small:
        return (
            places,
            f"{names([str(task.key) for task in small])} {'needs' if len(small) == 1 else 'need'} more memory",
        )
    return None


def _begin(scene: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    if scene.broken(plan) is not None or not may_try_servers(scene.limits, cluster):
        return None
    wanted = _wanted(scene, cluster)
    if wanted is None:
        return None
    places, why = wanted
    cluster, coming = give_all(scene, cluster, Role.PS, places, cluster.version + 1)
    cluster = msgspec.structs.replace(
        cluster, stage=Stage.CHANGING, since=scene.now, next_servers=coming, next_ports_held_at=None, until=None
    )
    new = names([str(task.key) for task in coming])
    reason = f"{why}: {new} {'is' if len(coming) == 1 else 'are'} started while training goes on"
    return changed(plan, scene.now, cluster=cluster, reason=reason)


def _prepare(scene: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    losses = scene.losses(cluster, cluster.next_servers)
    if losses:
        if scene.broken(plan) is not None:
            return None
        # Training goes on, so a change that cannot be paid for is given up, not the job.
        charged, problem = charge_one_of(scene.limits, cluster, losses)
        charged = msgspec.structs.replace(charged, outcome=None)
        given_up = f"{problem}; the change is given up, and training goes on" if problem else ""
        return _withdraw(scene, plan, charged, f"{ended(losses)}{given_up}")
    wanted = _wanted(scene, cluster)
    if scene.broken(plan) is None and (wanted is None or not _fits(scene, cluster, wanted[0])):
        return _withdraw(scene, plan, cluster, "other parameter servers are wanted by now")
    chief_is_ready = any(scene.ready(task) for task in tasks_of(cluster, Role.CHIEF))
    if not chief_is_ready or not all(scene.ready(task) for task in cluster.next_servers):
        return None
    # Those that have no process yet have nothing to leave.
    tasks = tuple(task for task in cluster.tasks if task.role is not Role.WORKER or _has_begun(scene, task))
    until = scene.now + scene.limits.save_timeout
    paused = msgspec.structs.replace(cluster, stage=Stage.PAUSING, since=scene.now, until=until, tasks=tasks)
    answer = "answers" if len(cluster.next_servers) == 1 else "answer"
    reason = f"{servers(len(cluster.next_servers))} of the next version {answer}, so training pauses"
    return changed(plan, scene.now, cluster=paused, reason=reason)


def _fits(scene: ClusterView, cluster: Cluster, places: Places) -> bool:
    """Whether the servers that are coming are what is wanted still."""
    coming = cluster.next_servers
    small = any(task.memory < limit_of(scene.limits, cluster, Role.PS, task.rank) for task in coming)
    return len(coming) == len(places) and not small and not any(scene.going(host_of(task)) for task in coming)


def _has_begun(scene: ClusterView, task: Task) -> bool:
    return scene.stage(task) in (TaskStage.STARTED, TaskStage.READY, TaskStage.ENDED)


def _withdraw(scene: ClusterView, plan: Plan, cluster: Cluster, reason: str) -> Plan:
    """The servers that were coming are ended; another change may begin."""
    cluster = msgspec.structs.replace(
        cluster, stage=Stage.TRAINING, since=scene.now, next_servers=(), next_ports_held_at=None, until=None
    )
    return changed(plan, scene.now, cluster=cluster, reason=reason)
