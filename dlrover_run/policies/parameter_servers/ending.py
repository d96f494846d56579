"""The end of a job: the chief has succeeded, the others have their grace, and the servers are ended last."""

from __future__ import annotations

import msgspec

from dlrover_run.coordination.decision import changed
from dlrover_run.coordination.records import Plan, PlanPhase
from dlrover_run.coordination.words import names
from dlrover_run.policies.parameter_servers.gathering import all_have_left
from dlrover_run.policies.parameter_servers.model import Cluster, EndCause, Role, Stage, Task, TaskStage
from dlrover_run.policies.parameter_servers.view import ClusterView, tasks_of

EVALUATION_FAILED = "the evaluation has failed: see the output of the evaluator"
"""Part of the reason of a job that has finished, where it holds."""


def end(scene: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """The plan once the chief has succeeded, or once every node has left; None while neither is so."""
    if cluster.stage is Stage.ENDING:
        return _finish(scene, plan, cluster)
    for chief in tasks_of(cluster, Role.CHIEF):
        if scene.succeeded(chief):
            ending = msgspec.structs.replace(
                cluster,
                stage=Stage.ENDING,
                since=scene.now,
                until=scene.now + scene.limits.end_grace,
                tasks=tuple(task for task in cluster.tasks if task.key != chief.key),
                next_servers=(),
                next_ports_held_at=None,
                insufficient_since=None,
            )
            return changed(plan, scene.now, cluster=ending, reason=f"{chief.key} on {chief.host} has succeeded")
    if all_have_left(scene):
        reason = "every node has left before the chief had succeeded"
        return changed(plan, scene.now, phase=PlanPhase.FAILED, since=scene.now, reason=reason)
    return None


def _finish(scene: ClusterView, plan: Plan, cluster: Cluster) -> Plan:
    trains = [task for task in cluster.tasks if task.role is not Role.PS]
    over = {task.key for task in trains if not _runs(scene, cluster, task)}
    late = [task for task in trains if task.key not in over]
    if any(_has_failed(scene, cluster, task) for task in trains if task.role is Role.EVALUATOR):
        cluster = msgspec.structs.replace(cluster, evaluator_failed=True)
    if late and cluster.until is not None and scene.now < cluster.until:
        if not over:
            return plan
        tasks = tuple(task for task in cluster.tasks if task.key not in over)
        return changed(plan, scene.now, cluster=msgspec.structs.replace(cluster, tasks=tasks))
    reason = plan.reason
    if late:
        reason += f"; {names([str(task.key) for task in late])} had {scene.limits.end_grace:g} s to end, and did not"
    if cluster.evaluator_failed:
        reason += f"; {EVALUATION_FAILED}"
    done = msgspec.structs.replace(cluster, until=None)
    return changed(
        plan, scene.now, phase=PlanPhase.FINISHED, since=scene.now, cluster=done, reason=reason, failure=None
    )


def _has_failed(scene: ClusterView, cluster: Cluster, task: Task) -> bool:
    """Whether it has ended otherwise than with success, or than because its node is gone."""
    loss = scene.loss(cluster, task)
    return loss is not None and not loss.free and loss.end.cause not in (EndCause.SUCCESS, EndCause.RESHAPED)


def _runs(scene: ClusterView, cluster: Cluster, task: Task) -> bool:
    """Whether it has a process that has still to end by itself. A worker that was never let in has nothing to end."""
    if task.role is Role.WORKER and cluster.opened_at is None:
        return False
    return scene.stage(task) in (TaskStage.STARTED, TaskStage.READY) and scene.loss(cluster, task) is None
