"""What a node that hosts nothing is told: who is here, what there is no room for yet, how long still."""

from __future__ import annotations

from dlrover_run.coordination.presence import Present
from dlrover_run.coordination.records import Plan, PlanPhase, Waiting
from dlrover_run.coordination.rules import Rules
from dlrover_run.coordination.words import counted, names
from dlrover_run.policies.parameter_servers.gathering import complete_at, deadline, waits_for_nobody
from dlrover_run.policies.parameter_servers.model import Cluster, Role, Stage
from dlrover_run.policies.parameter_servers.placement import rooms
from dlrover_run.policies.parameter_servers.rules import ClusterRules
from dlrover_run.policies.parameter_servers.versions import shortage
from dlrover_run.policies.parameter_servers.view import ClusterView


def progress(rules: Rules, plan: Plan, present: Present, now: float) -> Waiting:
    """The words for every node of a job with parameter servers that hosts none of its tasks."""
    scene = ClusterView(rules, present, now)
    cluster = plan.cluster or Cluster()
    if plan.phase is PlanPhase.TRAINING:
        if cluster.stage is Stage.ENDING:
            return Waiting("the chief has succeeded, and the others come to their end")
        return Waiting(f"{_size(cluster)} train{_succeeded(cluster)}; this node steps in should another one be needed")
    hosts = [p.status.host for p in scene.hosts]
    here = f"{counted(len(hosts), 'node')} {'is' if len(hosts) == 1 else 'are'} here{hosts and f': {names(hosts)}'}"
    if waits_for_nobody(scene, plan):
        return Waiting(f"{here}; the job is for {wanted(scene.limits)}")
    short = shortage(scene, cluster)
    complete = complete_at(scene, plan, cluster)
    until = deadline(scene, plan) if short else complete and complete.at
    left = None if until is None else max(0.0, until - now)
    return Waiting(f"{here}; {short or f'others may come, for there is room for {_offered(scene)}'}", left)


def wanted(rules: ClusterRules) -> str:
    """What a job consists of: `1 to 4 parameter servers, a chief and 2 workers`."""
    workers = _between(rules.min_workers, rules.max_workers, "worker")
    parts = [_between(rules.min_ps, rules.max_ps, "parameter server"), "a chief"]
    parts += [workers] if rules.max_workers else []
    parts += ["an evaluator"] if rules.evaluator else []
    return names(parts, len(parts)) if len(parts) <= 3 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _size(cluster: Cluster) -> str:
    servers = sum(task.role is Role.PS for task in cluster.tasks)
    workers = sum(task.role is Role.WORKER for task in cluster.tasks)
    return f"{counted(servers, 'parameter server')}, a chief and {counted(workers, 'worker')}"


def _succeeded(cluster: Cluster) -> str:
    """Who has nothing to do any more, in words that follow others."""
    over = [counted(len(cluster.succeeded_workers), "worker")] if cluster.succeeded_workers else []
    over += ["the evaluator"] if cluster.evaluator_succeeded else []
    has = "has" if len(cluster.succeeded_workers) + cluster.evaluator_succeeded == 1 else "have"
    return f", and {names(over)} {has} succeeded" if over else ""


def _offered(scene: ClusterView) -> str:
    """The rooms of those who are here, as far as the job would have them."""
    most = {Role.PS: scene.limits.max_ps, Role.WORKER: scene.limits.max_workers}
    servers, workers = (min(sum(rooms(scene, role).values()), number) for role, number in most.items())
    return f"{servers} of {counted(most[Role.PS], 'parameter server')} and {workers} of " + (
        counted(most[Role.WORKER], "worker")
    )


def _between(least: int, most: int, noun: str) -> str:
    return counted(most, noun) if least == most else f"{least} to {counted(most, noun)}"
