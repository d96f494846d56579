"""A planned change of the servers: the next servers start beside the current ones, then the workers leave, the chief
saves, and the next version continues from there."""

from __future__ import annotations

import msgspec

from dlrover_run.coordination.records.plan import Plan
from dlrover_run.words.reasons import Reasons
from tf_ps_runner.cluster import text
from tf_ps_runner.cluster.budgets import (
    consume_restarts,
    limit_of,
    may_try_servers,
    more_memory,
    raise_limit,
)
from tf_ps_runner.cluster.model import Cluster, EndCause, PlannedTask, Role, Stage, TaskStage
from tf_ps_runner.cluster.placement import (
    Places,
    all_slots,
    desired_ranks,
    min_tasks,
    new_tasks,
    server_places,
)
from tf_ps_runner.cluster.rules import ROLES
from tf_ps_runner.cluster.text import ClusterCode, memory_size, task_keys, task_name
from tf_ps_runner.cluster.versions import begin_version
from tf_ps_runner.cluster.view import ClusterView, host_of, tasks_of

LEAVING_STAGES = frozenset({Stage.PAUSING, Stage.SAVING})
"""The stages in which workers are ordered to leave."""


def reshape(view: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """Take the next step of a planned change."""
    if cluster.stage is Stage.TRAINING:
        return _raise_memory(view, plan, cluster) or _begin(view, plan, cluster)
    if cluster.stage is Stage.CHANGING:
        return _prepare(view, plan, cluster)
    if cluster.stage is Stage.PAUSING and not workers_left(view, plan, cluster):
        return view.update(plan, cluster, stage=Stage.SAVING, since=view.now)
    return None


def workers_left(view: ClusterView, plan: Plan, cluster: Cluster) -> bool:
    """Whether a worker may still train, including one that was dismissed before."""
    leftover = (key for _, key in view.leftover_tasks(plan, cluster))
    return bool(_leave_first(cluster)) or any(key is None or ROLES[key.role].leaves_first for key in leftover)


def _leave_first(cluster: Cluster) -> list[PlannedTask]:
    """The workers, and the tasks of any other role that leaves before the chief saves. Called to see whether they have
    left, and to name those that did not in time."""
    return [task for task in cluster.tasks if ROLES[task.role].leaves_first]


def conclude(view: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """The next version, once the chief has saved and left, or when that took too long."""
    if cluster.stage not in LEAVING_STAGES:
        return None
    before, after = len(tasks_of(cluster, Role.PS)), len(cluster.next_servers)
    # A chief whose workers serve it (ParameterServerStrategy) saves and leaves with them still there: they train
    # nothing by themselves, and it could not finish its step without them.
    for chief in tasks_of(cluster, Role.CHIEF):
        loss, status = view.loss_of(cluster, chief), view.status_of(chief)
        if loss is None or loss.end.cause is not EndCause.RESHAPED:
            continue
        # A chief that was ended with its node before it had saved is a loss.
        if not loss.free or (status is not None and status.saved >= max(0, status.step)):
            saved = status is not None and status.saved >= 0
            how = (ClusterCode.SAVED(chief=chief.key, step=status.saved),) if status is not None and saved else ()
            return begin_version(view, plan, cluster, (text.reshaped(before, after), *how), rolled_back=False)
    if cluster.until is not None and view.now >= cluster.until:
        if view.pending_reconnect(plan) is not None:
            return plan
        late = task_keys(_leave_first(cluster)) or ("the chief",)
        not_saved = ClusterCode.NOT_SAVED(late=late, seconds=view.limits.save_timeout)
        return begin_version(view, plan, cluster, (text.reshaped(before, after), not_saved), rolled_back=True)
    return None


def _raise_memory(view: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """Give a server that is near its memory limit more before it is killed for that."""
    limits = view.limits
    for task in tasks_of(cluster, Role.PS):
        status, state = view.status_of(task), cluster.role_state(Role.PS)
        if status is None or not status.near_memory_limit or not view.is_ready(task):
            continue
        raised = limit_of(limits, cluster, Role.PS, task.rank) > task.memory_mib
        if raised or more_memory(limits, task.memory_mib) == task.memory_mib:
            continue
        if state.memory_restarts >= limits.memory_restarts or not may_try_servers(limits, cluster):
            continue
        cluster = raise_limit(limits, cluster.with_role(state, memory_restarts=state.memory_restarts + 1), task)
        more = memory_size(limit_of(limits, cluster, Role.PS, task.rank))
        near = ClusterCode.NEAR_LIMIT(task=task_name(task), limit=memory_size(task.memory_mib), memory=more)
        return view.update(plan, cluster, (near,))
    return None


def _wanted(view: ClusterView, cluster: Cluster) -> tuple[Places, Reasons] | None:
    """Where the servers are wanted, and why, if that differs from where they are and from the memory they have."""
    limits, current = view.limits, tasks_of(cluster, Role.PS)
    places = server_places(view, cluster)
    if len(places) < min_tasks(limits, cluster, Role.PS):
        return None
    if len(places) > len(current) or len(desired_ranks(limits, cluster, Role.PS)) < len(current):
        return places, (ClusterCode.OTHER_NUMBER(wanted=len(places), current=len(current)),)
    leaving = [task for task in current if view.is_leaving(host_of(task))]
    if leaving:
        return places, view.departures(leaving)
    chiefs = [task for task in tasks_of(cluster, Role.CHIEF) if view.is_leaving(host_of(task))]
    if chiefs and all_slots(view, Role.CHIEF):
        # It saves before its node leaves: the data queues are on that node, and their state is saved with the
        # checkpoint.
        return places, (*view.departures(chiefs[:1]), ClusterCode.CHIEF_LEAVES())
    small = [task for task in current if task.memory_mib < limit_of(limits, cluster, Role.PS, task.rank)]
    return (places, (ClusterCode.MORE_MEMORY(tasks=task_keys(small)),)) if small else None


def _begin(view: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    if view.pending_reconnect(plan) is not None or not may_try_servers(view.limits, cluster):
        return None
    wanted = _wanted(view, cluster)
    if wanted is None:
        return None
    places, why = wanted
    cluster, tasks = new_tasks(view, cluster, Role.PS, places, cluster.version + 1)
    return _with_next(
        view, plan, cluster, (*why, ClusterCode.NEXT_START(tasks=task_keys(tasks))), Stage.CHANGING, tasks
    )


def _with_next(
    view: ClusterView, plan: Plan, cluster: Cluster, reasons: Reasons, stage: Stage, tasks: tuple[PlannedTask, ...] = ()
) -> Plan:
    """The plan with these next servers; without any, another change may begin. Called when they start; and without any
    when the change fails, or other servers are desired by then."""
    return view.update(
        plan, cluster, reasons, stage=stage, since=view.now, next_servers=tasks, next_ports_held_at=None, until=None
    )


def _prepare(view: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    is_known = view.pending_reconnect(plan) is None
    losses = view.losses_of(cluster, cluster.next_servers)
    if losses:
        if not is_known:
            return None
        # Training continues, so a change that uses up the restarts is given up, not the job.
        charged, problem = consume_restarts(view.limits, cluster, losses)
        charged = msgspec.structs.replace(charged, outcome=None)
        reasons = text.lost_tasks(losses)
        if problem:
            reasons = (*reasons, *problem, ClusterCode.CHANGE_GIVEN_UP())
        return _with_next(view, plan, charged, reasons, Stage.TRAINING)
    wanted = _wanted(view, cluster)
    if is_known and (wanted is None or not _fits(view, cluster, wanted[0])):
        return _with_next(view, plan, cluster, (ClusterCode.OTHERS_WANTED(),), Stage.TRAINING)
    chief_is_ready = any(view.is_ready(task) for task in tasks_of(cluster, Role.CHIEF))
    if not chief_is_ready or not all(view.is_ready(task) for task in cluster.next_servers):
        return None
    # Workers without a process have nothing to leave.
    none_begun = (None, TaskStage.HELD)
    begun = tuple(
        task for task in cluster.tasks if not ROLES[task.role].leaves_first or view.stage_of(task) not in none_begun
    )
    return view.update(
        plan,
        cluster,
        (ClusterCode.NEXT_READY(number=len(cluster.next_servers)),),
        stage=Stage.PAUSING,
        since=view.now,
        until=view.now + view.limits.save_timeout,
        tasks=begun,
    )


def _fits(view: ClusterView, cluster: Cluster, places: Places) -> bool:
    """Whether the next servers are still what is wanted."""
    tasks = cluster.next_servers
    small = any(task.memory_mib < limit_of(view.limits, cluster, Role.PS, task.rank) for task in tasks)
    return len(tasks) == len(places) and not small and not any(view.is_leaving(host_of(task)) for task in tasks)
