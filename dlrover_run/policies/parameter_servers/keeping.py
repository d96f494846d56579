"""What is kept full while a version runs: a chief, the workers that are wanted, the evaluator; and who is a member."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dlrover_run.coordination.decision import changed
from dlrover_run.coordination.records import Member, NodeStatus, Plan
from dlrover_run.coordination.words import counted, names
from dlrover_run.policies.parameter_servers.failures import LEAVING_STAGES
from dlrover_run.policies.parameter_servers.model import Cluster, Role, Stage, Task
from dlrover_run.policies.parameter_servers.orders import host_of
from dlrover_run.policies.parameter_servers.placement import give, place_one, wanted_workers
from dlrover_run.policies.parameter_servers.text import named
from dlrover_run.policies.parameter_servers.versions import begin_version, fail
from dlrover_run.policies.parameter_servers.view import ClusterView, holds_queues, leftovers, tasks_of


def fill(scene: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """The plan with one task more that is missing and for which there is room, or without workers that are too many."""
    if cluster.stage not in LEAVING_STAGES:
        dismissed = _dismiss(scene, plan, cluster)
        if dismissed is not None:
            return dismissed
    added: list[Task] = []
    before = cluster
    for role, rank in _missing(scene, cluster):
        place = place_one(scene, cluster, role, rank)
        if role is Role.CHIEF and holds_queues(cluster):
            if place is not None and scene.broken(plan) is None:
                return begin_version(scene, plan, cluster, "there is room for a chief again", rolled_back=True)
            continue
        if place is not None:
            cluster, task = give(scene, cluster, role, rank, cluster.version, place)
            cluster = msgspec.structs.replace(cluster, tasks=(*cluster.tasks, task))
            added.append(task)
    if cluster is before:
        return None
    return changed(plan, scene.now, cluster=cluster, reason=f"{_named(added)} {_is(added)} added")


def run_short(scene: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """Notes since when there has been no chief or too few workers; nobody waits for ever for room."""
    if cluster.stage in LEAVING_STAGES:
        return None
    short = _short_words(scene, cluster)
    if not short:
        ended = msgspec.structs.replace(cluster, insufficient_since=None)
        return changed(plan, scene.now, cluster=ended) if cluster.insufficient_since is not None else None
    if cluster.insufficient_since is None:
        return changed(plan, scene.now, cluster=msgspec.structs.replace(cluster, insufficient_since=scene.now))
    if scene.now < cluster.insufficient_since + scene.rules.pend_timeout:
        return None
    return fail(scene, plan, cluster, f"{plan.reason}; after {scene.rules.pend_timeout:g} s {short}")


def with_members(scene: ClusterView, plan: Plan, cluster: Cluster) -> Plan:
    """The plan that names the nodes which host tasks of it, and those that have some of before to end: a coordinator
    that takes over waits for them."""
    hosts = {host_of(task): None for task in (*cluster.tasks, *cluster.next_servers)}
    hosts.update((key, None) for key, _ in leftovers(scene, plan, cluster))
    known = {member.key: member for member in plan.members}
    kept = [member for member in plan.members if member.key in hosts]
    new = [_member(scene.present[key].status) for key in hosts if key not in known and key in scene.present]
    members = (*kept, *sorted(new, key=lambda member: member.key))
    return plan if members == plan.members else changed(plan, scene.now, members=members)


def _missing(scene: ClusterView, cluster: Cluster) -> list[tuple[Role, int]]:
    missing = []
    if not tasks_of(cluster, Role.CHIEF):
        missing.append((Role.CHIEF, 0))
    if cluster.stage in LEAVING_STAGES:
        return missing
    over = cluster.evaluator_succeeded or cluster.evaluator_failed
    if scene.limits.evaluator and not over and not tasks_of(cluster, Role.EVALUATOR):
        missing.append((Role.EVALUATOR, 0))
    here = {task.rank for task in tasks_of(cluster, Role.WORKER)}
    return missing + [(Role.WORKER, rank) for rank in wanted_workers(scene.limits, cluster) if rank not in here]


def _dismiss(scene: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    wanted = set(wanted_workers(scene.limits, cluster))
    # What the end of one costs, which has ended already, is still to be decided.
    extra = [
        task for task in tasks_of(cluster, Role.WORKER) if task.rank not in wanted and scene.loss(cluster, task) is None
    ]
    if not extra:
        return None
    tasks = tuple(task for task in cluster.tasks if task not in extra)
    reason = f"{counted(len(wanted), 'worker')} {'is' if len(wanted) == 1 else 'are'} wanted, so {_named(extra)} leave"
    reason += "s" if len(extra) == 1 else ""
    return changed(plan, scene.now, cluster=msgspec.structs.replace(cluster, tasks=tasks), reason=reason)


def _short_words(scene: ClusterView, cluster: Cluster) -> str:
    if not tasks_of(cluster, Role.CHIEF):
        return "there is no room for a chief"
    least = min(scene.limits.min_workers, len(wanted_workers(scene.limits, cluster)))
    workers = len(tasks_of(cluster, Role.WORKER))
    if cluster.stage is not Stage.ENDING and workers < least:
        return f"there is room for {workers} of at least {least} workers"
    return ""


def _named(tasks: Sequence[Task]) -> str:
    return names([named(task) for task in tasks])


def _is(tasks: Sequence[Task]) -> str:
    return "is" if len(tasks) == 1 else "are"


def _member(status: NodeStatus) -> Member:
    return Member(status.node_id, status.incarnation, status.host, status.workers, status.role)
