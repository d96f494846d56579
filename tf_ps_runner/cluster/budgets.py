"""What the end of a task costs: restarts of its role, more memory for its rank, and how often leaving is free."""

from __future__ import annotations

import msgspec

from dlrover_run.words.reasons import Reasons
from tf_ps_runner.cluster.model import (
    Cluster,
    EndCause,
    MemoryLimit,
    PlannedTask,
    Role,
    UnexpectedExits,
)
from tf_ps_runner.cluster.rules import MEMORY_FACTOR, ROLES, ClusterRules
from tf_ps_runner.cluster.text import ClusterCode
from tf_ps_runner.cluster.view import LostTask

FREE_EXITS = 3
"""How many processes of a rank in a row may leave for a change of the cluster that was never ordered. A script that
always exits with that code would be restarted for ever; each further exit counts as a failure."""


def may_try_servers(limits: ClusterRules, cluster: Cluster) -> bool:
    """Whether new servers may be started beside those that train. If these fail too often the job continues, but no
    further ones are tried. Asked before a planned change begins or a server gets more memory (`cluster/reshape`),
    before an operator's number of servers is granted (`cluster/scaling`), and before the job chooses another number
    (`cluster/autoscaling`)."""
    return cluster.role_state(Role.PS).failures <= limits.max_restarts


def limit_of(limits: ClusterRules, cluster: Cluster, role: Role, rank: int) -> int:
    """The memory limit in MiB of a new task of that rank, 0 for none. Called for each new task (`cluster/placement`),
    and by `cluster/reshape` to see which servers have less than that."""
    raised = (limit.memory_mib for limit in cluster.memory_limits if (limit.role, limit.rank) == (role, rank))
    return next(raised, ROLES[role].memory(limits))


def more_memory(limits: ClusterRules, memory: int) -> int:
    """The memory limit in MiB after one that was too low; the same one when it must not grow. Called by `raise_limit`,
    and by `cluster/reshape` to see whether a server near its limit can get more."""
    more = memory * MEMORY_FACTOR
    return more if not limits.max_memory else max(memory, min(more, limits.max_memory))


def raise_limit(limits: ClusterRules, cluster: Cluster, task: PlannedTask) -> Cluster:
    """Give the rank of that task more memory from now on, if it had a limit. Called when a task was killed for its
    memory, and by `cluster/reshape` when a server is near its limit."""
    memory = more_memory(limits, task.memory_mib)
    if memory <= limit_of(limits, cluster, task.role, task.rank):
        return cluster
    others = [limit for limit in cluster.memory_limits if (limit.role, limit.rank) != (task.role, task.rank)]
    raised = sorted([*others, MemoryLimit(task.role, task.rank, memory)], key=lambda limit: (limit.role, limit.rank))
    return msgspec.structs.replace(cluster, memory_limits=tuple(raised))


def consume_restarts(limits: ClusterRules, cluster: Cluster, losses: list[LostTask]) -> tuple[Cluster, Reasons]:
    """Charge tasks of one role that ended together; also why the job cannot continue, to follow the ends, or nothing.
    However many tasks ended, that is one restart: had the first end been reported alone, the others would have ended
    with its version. Called when servers are lost or another task has ended (`cluster/failures`), and when servers of a
    planned change fail before they are used (`cluster/reshape`)."""
    charged: set[EndCause] = set()
    for loss in losses:
        if loss.free:
            continue
        cluster, cause = _count_exit(cluster, loss)
        problem: Reasons = ()
        if cause is EndCause.REPEATED:
            problem = (ClusterCode.REPEATED(),)
        elif cause is EndCause.MEMORY and 0 < limits.max_memory <= loss.task.memory_mib:
            problem = (ClusterCode.MEMORY_EXHAUSTED(most=limits.max_memory),)
        elif cause is EndCause.MEMORY:
            cluster = raise_limit(limits, cluster, loss.task)
        if not problem and cause is not EndCause.RESHAPED and cause not in charged:
            charged.add(cause)
            cluster, problem = _use_restart(limits, cluster, loss.task.role, cause)
        if problem:
            return msgspec.structs.replace(cluster, outcome=loss.end), problem
    return cluster, ()


def _use_restart(limits: ClusterRules, cluster: Cluster, role: Role, cause: EndCause) -> tuple[Cluster, Reasons]:
    state, is_memory = cluster.role_state(role), cause is EndCause.MEMORY
    used, most = (state.memory_restarts, limits.memory_restarts) if is_memory else (state.failures, limits.max_restarts)
    charged = cluster.with_role(state, **{"memory_restarts" if is_memory else "failures": used + 1})
    if used < most:
        return charged, ()
    whose = ROLES[role].label + " with more memory" * is_memory
    return charged, ((ClusterCode.RESTARTS_USED if most else ClusterCode.NO_RESTARTS)(most=most, whose=whose),)


def _count_exit(cluster: Cluster, loss: LostTask) -> tuple[Cluster, EndCause]:
    """What the end counts as. Nothing ordered a task to leave that is charged here, whatever its exit code."""
    task, cause = loss.task, loss.end.cause
    place = (task.role, task.rank)
    others = tuple(exits for exits in cluster.unexpected_exits if (exits.role, exits.rank) != place)
    times = sum(exits.times for exits in cluster.unexpected_exits if (exits.role, exits.rank) == place)
    if cause is EndCause.RESHAPED:
        times += 1
        counts = (*others, UnexpectedExits(task.role, task.rank, times))
        cluster = msgspec.structs.replace(cluster, unexpected_exits=counts)
        return cluster, cause if times <= FREE_EXITS else EndCause.FAILURE
    cluster = msgspec.structs.replace(cluster, unexpected_exits=others) if times else cluster
    return cluster, cause if cause in (EndCause.MEMORY, EndCause.REPEATED) else EndCause.FAILURE
