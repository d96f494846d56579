"""What the partitioned tables of a model ask of the number of parameter servers.

A table that is looked up with `partition_strategy="mod"` can only be restored onto as many parts as it was saved with,
and only the script knows how many parts it makes. So the chief reports which numbers of servers are safe, and does not
restore a checkpoint whose parts differ from those of its graph.
"""

from __future__ import annotations

import msgspec

from dlrover_run.coordination.decision import changed
from dlrover_run.coordination.records import Plan
from dlrover_run.policies.parameter_servers.model import Cluster, EndCause, Role, ServerBounds, Task, TaskEnd
from dlrover_run.policies.parameter_servers.text import not_restored, servers
from dlrover_run.policies.parameter_servers.versions import begin_version, fail
from dlrover_run.policies.parameter_servers.view import ClusterView, Loss, tasks_of


def bound_servers(scene: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """The plan with the bounds that the chief has reported; with a version of another number of servers, or the end of
    the job, where it did not restore the model."""
    for chief in tasks_of(cluster, Role.CHIEF):
        told = scene.told(chief)
        bounds = told.server_bounds if told is not None else None
        if bounds is None:
            continue
        if bounds.refused:
            return _other_servers(scene, plan, cluster, chief, bounds)
        bounds = _narrowed(cluster.server_bounds, bounds)
        if bounds != cluster.server_bounds:
            return changed(plan, scene.now, cluster=msgspec.structs.replace(cluster, server_bounds=bounds))
    return None


def _narrowed(known: ServerBounds | None, told: ServerBounds) -> ServerBounds:
    """What both allow. A bound that was learned from a refusal holds on, for the chief cannot know it beforehand."""
    if known is None:
        return told
    least, most = max(known.least, told.least), min(known.most, told.most)
    if (least, most) == (known.least, known.most) or least > most:
        return known
    return msgspec.structs.replace(told, least=least, most=most)


def _other_servers(scene: ClusterView, plan: Plan, cluster: Cluster, chief: Task, bounds: ServerBounds) -> Plan:
    """The plan with the number of servers that the model was trained with, or else the one that the chief has computed.
    The same number is never tried twice."""
    if scene.broken(plan) is not None:
        return plan
    present = len(tasks_of(cluster, Role.PS))
    number = cluster.proven_servers if cluster.proven_servers not in (0, present) else bounds.least
    why = not_restored(chief, bounds, present)
    tried = cluster.server_bounds is not None and cluster.server_bounds.least == cluster.server_bounds.most == present
    if number in (0, present) or tried:
        return _fail(scene, plan, cluster, chief, f"{why}; use as many servers as when the checkpoint was written")
    if not scene.limits.min_ps <= number <= scene.limits.max_ps:
        return _fail(scene, plan, cluster, chief, f"{why}; start the job with --ps={number}")
    exact = msgspec.structs.replace(bounds, least=number, most=number, refused=0)
    cluster = msgspec.structs.replace(cluster, server_bounds=exact)
    return begin_version(scene, plan, cluster, f"{why}, so {servers(number)} are needed", rolled_back=True)


def _fail(scene: ClusterView, plan: Plan, cluster: Cluster, chief: Task, reason: str) -> Plan:
    what = reason.removeprefix(f"{chief.key} on {chief.host} ")
    return fail(scene, plan, cluster, reason, Loss(chief, TaskEnd(EndCause.FAILURE, what)))
