"""What follows when a task has ended: of a server the next version, of any other a successor in its place."""

from __future__ import annotations

import msgspec

from dlrover_run.coordination.decision import changed
from dlrover_run.coordination.records import Plan
from dlrover_run.policies.parameter_servers.budgets import charge, charge_one_of
from dlrover_run.policies.parameter_servers.model import Cluster, EndCause, Role, Stage, Task
from dlrover_run.policies.parameter_servers.orders import host_of
from dlrover_run.policies.parameter_servers.placement import give, place_one, wanted_workers
from dlrover_run.policies.parameter_servers.text import ended, named, replaced
from dlrover_run.policies.parameter_servers.versions import begin_version, fail
from dlrover_run.policies.parameter_servers.view import ClusterView, Loss, holds_queues, tasks_of

NO_EVALUATION = "the evaluator is not started again, and training goes on without evaluation"

LEAVING_STAGES = frozenset({Stage.PAUSING, Stage.SAVING})
"""The stages in which workers are told to leave."""


def lose_servers(scene: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """A server is lost, and with it a part of the model: the next version begins."""
    losses = scene.losses(cluster, tasks_of(cluster, Role.PS))
    if not losses:
        return None
    if scene.broken(plan) is not None:
        # Whoever may be lost with it is known in a moment, and one version is enough for all.
        return plan
    cluster, problem = charge_one_of(scene.limits, cluster, losses)
    if problem:
        return fail(scene, plan, cluster, f"{ended(losses)}{problem}", _of_outcome(cluster, losses))
    return begin_version(scene, plan, cluster, ended(losses), rolled_back=True, losses=losses)


def replace_others(scene: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """The chief, a worker or the evaluator has ended: another one takes its place, and nobody else is disturbed."""
    for task in cluster.tasks:
        if task.role is Role.PS:
            continue
        loss = scene.loss(cluster, task)
        if loss is not None:
            return _replace(scene, plan, cluster, loss)
    return None


def move_from_leaving(scene: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """Tasks on nodes that were asked to go are started elsewhere, where there is room; servers take a new version."""
    if cluster.stage in LEAVING_STAGES:
        return None
    with_servers = {host_of(task) for task in tasks_of(cluster, Role.PS)}
    for task in cluster.tasks:
        node = host_of(task)
        if task.role is Role.PS or scene.gone(node) or not scene.going(node):
            continue
        if task.role is Role.CHIEF and (node in with_servers or holds_queues(cluster)):
            # The next version takes it along.
            continue
        without = _without(cluster, task)
        place = place_one(scene, without, task.role, task.rank)
        if place is None:
            continue
        moved, successor = give(scene, without, task.role, task.rank, cluster.version, place)
        reason = f"{scene.departure(task)}; {named(successor)} takes the place of {task.key}"
        moved = msgspec.structs.replace(moved, tasks=(*moved.tasks, successor))
        return changed(plan, scene.now, cluster=moved, reason=reason)
    return None


def _replace(scene: ClusterView, plan: Plan, cluster: Cluster, loss: Loss) -> Plan:
    task = loss.task
    if loss.end.cause is EndCause.SUCCESS:
        cluster = _without(cluster, task)
        if task.role is Role.EVALUATOR:
            return changed(plan, scene.now, cluster=msgspec.structs.replace(cluster, evaluator_succeeded=True))
        done = tuple(sorted({*cluster.succeeded_workers, task.rank}))
        return changed(plan, scene.now, cluster=msgspec.structs.replace(cluster, succeeded_workers=done))
    leaves = task.role is Role.WORKER and cluster.stage in LEAVING_STAGES
    if leaves and loss.end.cause is EndCause.RESHAPED:
        return changed(plan, scene.now, cluster=_without(cluster, task))
    if not loss.free and any(_is_broken(scene, server) for server in tasks_of(cluster, Role.PS)):
        # What it ended of may be the loss of a server, which is known in a moment and ends all.
        return plan
    cluster, problem = charge(scene.limits, cluster, loss)
    if problem and task.role is Role.EVALUATOR:
        # It only reads checkpoints, so that training needs it no more than a person who looks at them.
        without = msgspec.structs.replace(_without(cluster, task), evaluator_failed=True, outcome=None)
        return changed(plan, scene.now, cluster=without, reason=f"{ended([loss])}{problem}; {NO_EVALUATION}")
    if problem:
        return fail(scene, plan, cluster, f"{ended([loss])}{problem}", loss)
    cluster = _without(cluster, task)
    reason = ended([loss])
    if not leaves and (task.role is not Role.WORKER or task.rank in wanted_workers(scene.limits, cluster)):
        place = place_one(scene, cluster, task.role, task.rank, host_of(task))
        if place not in (None, host_of(task)) and task.role is Role.CHIEF and holds_queues(cluster):
            if scene.broken(plan) is not None:
                return plan
            return begin_version(scene, plan, cluster, f"{reason}, and with it the place in the data", rolled_back=True)
        if place is not None:
            cluster, successor = give(scene, cluster, task.role, task.rank, cluster.version, place)
            cluster = msgspec.structs.replace(cluster, tasks=(*cluster.tasks, successor))
            reason += f"; {replaced([loss], [successor])}"
        else:
            reason += "; there is no room for another one now"
    return changed(plan, scene.now, cluster=cluster, reason=reason)


def _without(cluster: Cluster, task: Task) -> Cluster:
    return msgspec.structs.replace(cluster, tasks=tuple(one for one in cluster.tasks if one.key != task.key))


def _is_broken(scene: ClusterView, task: Task) -> bool:
    p = scene.present.get(host_of(task))
    return p is not None and not p.connected and not scene.gone(host_of(task))


def _of_outcome(cluster: Cluster, losses: list[Loss]) -> Loss | None:
    return next((loss for loss in losses if loss.end == cluster.outcome), None)
