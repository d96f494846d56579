"""What a task's end costs: restarts that a role has, memory that a rank may get, and how often leaving is free."""

from __future__ import annotations

import msgspec

from dlrover_run.policies.parameter_servers.model import (
    Cluster,
    EndCause,
    MemoryLimit,
    Role,
    RoleUsage,
    Task,
    TaskEnd,
    UnexpectedExits,
)
from dlrover_run.policies.parameter_servers.rules import MEMORY_FACTOR, ClusterRules
from dlrover_run.policies.parameter_servers.view import Loss

FREE_RETURNS = 3
"""How many processes of a rank in a row may leave for a change of membership that nobody has ordered. A script that
always exits with that code would be started for ever; each one more counts as a failure."""

ROLE_WORDS = {
    Role.CHIEF: "the chief",
    Role.WORKER: "workers",
    Role.PS: "parameter servers",
    Role.EVALUATOR: "the evaluator",
}


def spent_of(cluster: Cluster, role: Role) -> RoleUsage:
    """What that role has cost so far."""
    return next((spent for spent in cluster.usage if spent.role is role), RoleUsage(role))


def with_spent(cluster: Cluster, spent: RoleUsage) -> Cluster:
    """The cluster in which a role has cost that."""
    others = [other for other in cluster.usage if other.role is not spent.role]
    return msgspec.structs.replace(cluster, usage=tuple(sorted([*others, spent], key=lambda one: one.role)))


def may_try_servers(limits: ClusterRules, cluster: Cluster) -> bool:
    """Whether new servers may be tried beside those that train. When they fail too often that does not end the job, but
    no more are tried then."""
    return spent_of(cluster, Role.PS).failures <= limits.max_restarts


def limit_of(limits: ClusterRules, cluster: Cluster, role: Role, rank: int) -> int:
    """The memory in MiB that a new task of that rank gets, 0 for no limit."""
    first = limits.ps_memory if role is Role.PS else limits.worker_memory
    return next((limit.memory for limit in cluster.memory_limits if (limit.role, limit.rank) == (role, rank)), first)


def more_memory(limits: ClusterRules, memory: int) -> int:
    """The memory in MiB after one that was not enough; the same when there is no more."""
    more = memory * MEMORY_FACTOR
    return more if not limits.max_memory else max(memory, min(more, limits.max_memory))


def raise_limit(limits: ClusterRules, cluster: Cluster, task: Task) -> Cluster:
    """The rank of that task gets more memory from now on, if it had a limit."""
    memory = more_memory(limits, task.memory)
    if memory <= limit_of(limits, cluster, task.role, task.rank):
        return cluster
    others = [limit for limit in cluster.memory_limits if (limit.role, limit.rank) != (task.role, task.rank)]
    raised = sorted([*others, MemoryLimit(task.role, task.rank, memory)], key=lambda limit: (limit.role, limit.rank))
    return msgspec.structs.replace(cluster, memory_limits=tuple(raised))


def charge(limits: ClusterRules, cluster: Cluster, loss: Loss) -> tuple[Cluster, str]:
    """The cluster after that loss; and why the job cannot go on, in words that follow those of the end, or nothing."""
    return charge_one_of(limits, cluster, [loss])


def charge_one_of(limits: ClusterRules, cluster: Cluster, losses: list[Loss]) -> tuple[Cluster, str]:
    """The same for tasks of one role that ended together. However many they are, that is one restart: had the first one
    been heard of alone, the others would have ended with its version."""
    charged: set[EndCause] = set()
    for loss in losses:
        if loss.free:
            continue
        cluster, cause = _cause(cluster, loss)
        if cause is EndCause.REPEATED:
            return _with_outcome(cluster, loss.end), ", twice soon after its start, so another start would not help"
        if cause is EndCause.MEMORY and limits.max_memory and 0 < limits.max_memory <= loss.task.memory:
            return _with_outcome(
                cluster, loss.end
            ), f"; more than {limits.max_memory} MiB are not allowed (--max-memory)"
        if cause is EndCause.MEMORY:
            cluster = raise_limit(limits, cluster, loss.task)
        if cause is EndCause.RESHAPED or cause in charged:
            continue
        charged.add(cause)
        cluster, problem = _pay(limits, cluster, loss.task.role, cause)
        if problem:
            return _with_outcome(cluster, loss.end), problem
    return cluster, ""


def _pay(limits: ClusterRules, cluster: Cluster, role: Role, cause: EndCause) -> tuple[Cluster, str]:
    spent = spent_of(cluster, role)
    if cause is EndCause.MEMORY:
        paid, most = msgspec.structs.replace(spent, memory=spent.memory + 1), limits.memory_restarts
        if spent.memory >= most:
            return with_spent(cluster, paid), _used_up(most, f"of {ROLE_WORDS[role]} with more memory")
        return with_spent(cluster, paid), ""
    paid, most = msgspec.structs.replace(spent, failures=spent.failures + 1), limits.max_restarts
    if spent.failures >= most:
        return with_spent(cluster, paid), _used_up(most, f"of {ROLE_WORDS[role]}")
    return with_spent(cluster, paid), ""


def _cause(cluster: Cluster, loss: Loss) -> tuple[Cluster, EndCause]:
    """What the end counts as. A server that ends by itself was not told to, whatever its exit code."""
    task, cause = loss.task, loss.end.cause
    before = next((one.times for one in cluster.unexpected_exits if (one.role, one.rank) == (task.role, task.rank)), 0)
    times = before + 1 if cause is EndCause.RESHAPED else 0
    others = tuple(one for one in cluster.unexpected_exits if (one.role, one.rank) != (task.role, task.rank))
    if times != before:
        counts = (*others, UnexpectedExits(task.role, task.rank, times)) if times else others
        cluster = msgspec.structs.replace(cluster, unexpected_exits=counts)
    if cause is EndCause.RESHAPED and times <= FREE_RETURNS:
        return cluster, cause
    return cluster, cause if cause in (EndCause.MEMORY, EndCause.REPEATED) else EndCause.FAILURE


def _with_outcome(cluster: Cluster, end: TaskEnd) -> Cluster:
    return msgspec.structs.replace(cluster, outcome=end)


def _used_up(most: int, whose: str) -> str:
    if not most:
        return f"; no restart {whose} is allowed"
    return (
        f"; {'the one restart' if most == 1 else f'all {most} restarts'} {whose} {'was' if most == 1 else 'were'} used"
    )
