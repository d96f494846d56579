"""A version of the cluster: which tasks it has, what it continues from, and how it comes to train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dlrover_run.coordination.decision import Deadline, DeadlineReason, deadline_if, update_plan
from dlrover_run.coordination.membership import all_have_left
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.round import Failure, RoundKey
from dlrover_run.words.reasons import Code, Reasons, chain, shown_names
from tf_ps_runner.cluster import text
from tf_ps_runner.cluster.model import Cluster, PlannedTask, Role, RoleState, Stage, TaskStage
from tf_ps_runner.cluster.placement import (
    all_slots,
    desired_ranks,
    min_tasks,
    new_tasks,
    server_places,
    slots,
    spread,
)
from tf_ps_runner.cluster.rules import ROLES, Loss
from tf_ps_runner.cluster.text import ClusterCode
from tf_ps_runner.cluster.view import ClusterView, LostTask, host_of, tasks_of


def gather(view: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """The plan that follows while no version runs; None when nothing changes now."""
    if all_have_left(view.nodes, view.now):
        gone = (*plan.reasons, Code.NO_NODE_LEFT()) if cluster.version else (Code.EVERY_NODE_LEFT(),)
        return fail(view, plan, Cluster.find(plan.parts), gone)
    if _is_empty(view, plan):
        return None
    short, deadline = _awaited(view, plan, cluster)
    if deadline is not None and view.now < deadline.at:
        return None
    hosts = [p.report.host for p in view.hosts]
    if short:
        before = plan.reasons if plan.key.number else ()
        code = ClusterCode.TOO_FEW_NODES if hosts else ClusterCode.NO_NODE_HERE
        too_few = code(hosts=shown_names(hosts), seconds=_gather_timeout(view, plan))
        return fail(view, plan, Cluster.find(plan.parts), (*before, too_few, *short))
    why = plan.reasons if plan.key.number else (ClusterCode.NODES_HERE(number=len(hosts)),)
    if not plan.key.number and not _is_full(view, cluster):
        why = (*why, Code.LAST_CALL_OVER(seconds=view.rules.last_call_timeout))
    return begin_version(view, plan, cluster, why, rolled_back=bool(plan.key.number))


def gather_deadlines(view: ClusterView, plan: Plan, cluster: Cluster) -> tuple[Deadline, ...]:
    if _is_empty(view, plan):
        return ()
    short, deadline = _awaited(view, plan, cluster)
    found = () if deadline is None else (deadline,)
    return (*found, *deadline_if(view.pending_reconnect(plan), DeadlineReason.LOST)) if short else found


def gather_text(view: ClusterView, plan: Plan, cluster: Cluster) -> tuple[Reasons, float | None]:
    """What nodes wait for while no version runs, and until when."""
    hosts = [p.report.host for p in view.hosts]
    if _is_empty(view, plan):
        return text.gathering(hosts, (ClusterCode.JOB_IS_FOR(size=view.limits.job_size()),)), None
    short, deadline = _awaited(view, plan, cluster)
    others = text.others_may_come({role: all_slots(view, role) for role in ROLES}, view.limits)
    return text.gathering(hosts, short or (others,)), None if deadline is None else deadline.at


def _is_empty(view: ClusterView, plan: Plan) -> bool:
    """Whether no node has come yet, so that no timeout runs. Asked by the decision, its deadlines and its text alike,
    as is `_awaited`."""
    return not plan.key.number and not view.hosts


def _gather_timeout(view: ClusterView, plan: Plan) -> float:
    return view.rules.pend_timeout if plan.key.number else view.rules.join_timeout


def _awaited(view: ClusterView, plan: Plan, cluster: Cluster) -> tuple[Reasons, Deadline | None]:
    """What there are too few slots for, and until when nodes wait: for others if so, else until it is known which nodes
    take part, if no node comes or goes before that."""
    short = _shortage(view, cluster, len(server_places(view, cluster)))
    if short:
        reason = DeadlineReason.REPLACEMENT if plan.key.number else DeadlineReason.JOIN
        return short, Deadline(plan.since + _gather_timeout(view, plan), reason)
    found = [*deadline_if(view.pending_reconnect(plan), DeadlineReason.LOST)]
    if not plan.key.number and not _is_full(view, cluster):
        last_call = max(p.joined_at for p in view.hosts) + view.rules.last_call_timeout
        found.append(Deadline(last_call, DeadlineReason.LAST_CALL))
    return (), max(found, key=lambda deadline: deadline.at, default=None)


def _is_full(view: ClusterView, cluster: Cluster) -> bool:
    """Whether there are slots for all that is desired, or as many nodes as may come."""
    fits = all(all_slots(view, role) >= len(desired_ranks(view.limits, cluster, role)) for role in ROLES)
    return fits or len(view.hosts) >= view.rules.max_size


def _shortage(view: ClusterView, cluster: Cluster, ps: int) -> Reasons:
    """What there is no slot for that every version needs, with slots for that many servers; empty when there are slots
    for the minimum of each role. Called while nodes gather, and when a version begins."""
    found = {role: ps if role is Role.PS else all_slots(view, role) for role in ROLES}
    least = {role: min_tasks(view.limits, cluster, role) for role in ROLES}
    missing = [(role, found[role], least[role]) for role in ROLES if found[role] < least[role]]
    return text.shortage(missing, cluster, view.limits)


def begin_version(
    view: ClusterView, plan: Plan, cluster: Cluster, why: Reasons, rolled_back: bool, losses: Sequence[LostTask] = ()
) -> Plan:
    """The plan in which the next version starts, or in which its nodes gather when there are too few slots.

    The next servers take part if there are any, because nothing was ever stored in them. With `rolled_back` the model
    goes back to a checkpoint, so workers that have succeeded are needed again. Called when enough nodes have gathered
    (here), when servers are lost or a chief must move (`cluster/failures`), when a planned change is over
    (`cluster/reshape`), and when the model needs another number of servers (`cluster/scaling`).
    """
    limits, number = view.limits, max(plan.key.number, cluster.version) + 1
    cluster = _close_version(view, cluster, rolled_back)
    cluster, next_servers = _next_servers(view, cluster, number)
    before = {role: {task.rank: host_of(task) for task in tasks_of(cluster, role)} for role in ROLES}
    running = [task for task in cluster.tasks if view.runs(task) and not view.is_leaving(host_of(task))]
    kept = tuple(task for task in running if ROLES[task.role].outlives_versions)
    empty = msgspec.structs.replace(cluster, tasks=kept, next_servers=())
    short = _shortage(view, empty, len(next_servers))
    common: dict[str, Any] = {"since": view.now, "failure": None}
    if short:
        # All tasks end, and the nodes wait for others.
        return update_plan(
            plan,
            view.now,
            phase=PlanPhase.GATHERING,
            part=_starting(view, cluster, ()),
            reasons=chain(why, *short),
            **common,
        )
    cluster, tasks = empty, [*next_servers]
    for role, spec in ROLES.items():
        if spec.loss is not Loss.NEW_VERSION and not spec.outlives_versions:
            places = spread(desired_ranks(limits, cluster, role), slots(view, role), before[role])
            cluster, new = new_tasks(view, cluster, role, places, number)
            tasks += new
    successors = text.replacements(losses, next_servers)
    if successors and len(next_servers) > len(losses):
        successors = (*successors, ClusterCode.ALL_RESTART())
    is_fewer = len(next_servers) < len(desired_ranks(limits, cluster, Role.PS))
    fewer = (ClusterCode.FEWER_SERVERS(number=len(next_servers)),) if is_fewer else ()
    reasons = chain((ClusterCode.VERSION(number=number),), *why, *successors, *fewer)
    cluster = msgspec.structs.replace(_starting(view, cluster, (*tasks, *kept)), version=number)
    key = RoundKey(plan.epoch, number)
    return update_plan(plan, view.now, phase=PlanPhase.TRAINING, key=key, part=cluster, reasons=reasons, **common)


def fail(
    view: ClusterView, plan: Plan, cluster: Cluster | None, reasons: Reasons, loss: LostTask | None = None
) -> Plan:
    """The job fails, because of the end of a task if there is one. Called when nodes do not come or leave for good and
    when processes of earlier versions stay (here), when restarts are used up or tasks are missing for too long
    (`cluster/failures`), and when no number of servers fits the model (`cluster/scaling`)."""
    failure = plan.failure
    if loss is not None:
        end = loss.end
        failure = Failure(
            loss.task.rank,
            loss.task.host,
            end.exit_text,
            trace=end.trace,
            exit_status=end.exit_status,
            task=str(loss.task.key),
        )
    phase = PlanPhase.FAILED
    return update_plan(
        plan, view.now, phase=phase, since=view.now, part=cluster, reasons=chain(reasons), failure=failure
    )


def _close_version(view: ClusterView, cluster: Cluster, rolled_back: bool) -> Cluster:
    """The cluster at the end of its version: how far it has come, and what is not counted against the next one."""
    reported = [status for task in cluster.tasks if (status := view.status_of(task)) is not None]
    return msgspec.structs.replace(
        cluster,
        step=max([cluster.step, *(status.step for status in reported)]),
        saved=max([cluster.saved, *(status.saved for status in reported)]),
        roles=tuple(_rolled_back(state) for state in cluster.roles) if rolled_back else cluster.roles,
        # No task has trained in a version that was never opened.
        paused=not rolled_back or (cluster.paused and cluster.opened_at is None),
        # The others may have left because of a server.
        unexpected_exits=tuple(one for one in cluster.unexpected_exits if ROLES[one.role].loss is Loss.NEW_VERSION),
    )


def _rolled_back(state: RoleState) -> RoleState:
    return state if ROLES[state.role].outlives_versions else msgspec.structs.replace(state, succeeded=())


def _next_servers(view: ClusterView, cluster: Cluster, number: int) -> tuple[Cluster, tuple[PlannedTask, ...]]:
    ready = cluster.next_servers
    lost = any(view.loss_of(cluster, task) is not None or view.is_leaving(host_of(task)) for task in ready)
    allowed = cluster.server_bounds is None or cluster.server_bounds.allow(len(ready))
    if ready and not lost and allowed and all(task.version == number for task in ready):
        return cluster, ready
    return new_tasks(view, cluster, Role.PS, server_places(view, cluster), number)


def _starting(view: ClusterView, cluster: Cluster, tasks: tuple[PlannedTask, ...]) -> Cluster:
    """The cluster with these tasks, before anything is known of them."""
    return msgspec.structs.replace(
        cluster,
        stage=Stage.STARTING,
        since=view.now,
        until=None,
        tasks=tasks,
        next_servers=(),
        ports_held_at=None,
        servers_ready_at=None,
        opened_at=None,
        next_ports_held_at=None,
        insufficient_since=None,
    )


def note_ports(view: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """The plan with the addresses that have become known. A chief may start only once no earlier one is left, because
    two would write the same checkpoints."""
    chief_is_left = any(key is None or key.role is Role.CHIEF for _, key in view.leftover_tasks(plan, cluster))
    tasks = tuple(_with_address(view, task, chief_is_left) for task in cluster.tasks)
    next_servers = tuple(_with_address(view, task, chief_is_left) for task in cluster.next_servers)
    noted = msgspec.structs.replace(cluster, tasks=tasks, next_servers=next_servers)
    awaited = [task for task in tasks if ROLES[task.role].address_awaited]
    if cluster.ports_held_at is None and tasks_of(noted, Role.CHIEF) and all(task.port for task in awaited):
        noted = msgspec.structs.replace(noted, ports_held_at=view.now)
    if cluster.next_ports_held_at is None and next_servers and all(task.port for task in next_servers):
        noted = msgspec.structs.replace(noted, next_ports_held_at=view.now)
    return None if noted == cluster else view.update(plan, noted)


def _with_address(view: ClusterView, task: PlannedTask, chief_is_left: bool) -> PlannedTask:
    status = view.status_of(task)
    if task.port or status is None or not status.port or status.stage is TaskStage.ENDED:
        return task
    if task.role is Role.CHIEF and chief_is_left:
        return task
    address = view.nodes[host_of(task)].report.address
    return msgspec.structs.replace(
        task, address=address, port=status.port, queue_port=status.queue_port, queue_key=status.queue_key
    )


def open_gate(view: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """The plan once all servers answer; and once the chief has a complete model and no process is left that could train
    with another version, which lets the workers in."""
    servers = tasks_of(cluster, Role.PS)
    if cluster.stage is not Stage.STARTING or not all(view.is_ready(task) for task in servers):
        return None
    if cluster.servers_ready_at is None:
        return view.update(plan, cluster, servers_ready_at=view.now)
    chief = next((task for task in tasks_of(cluster, Role.CHIEF) if view.is_ready(task)), None)
    if chief is None:
        return None
    left = view.leftover_tasks(plan, cluster)
    if left:
        deadline = leftover_deadline(view, cluster)
        if deadline is None or view.now < deadline:
            return None
        node, key = left[0]
        return fail(
            view,
            plan,
            cluster,
            (*plan.reasons, ClusterCode.LEFTOVER(task=key or "a process", host=view.nodes[node].report.host)),
        )
    status = view.status_of(chief)
    step, reached = (status.restored, status.reached) if status is not None else (-1, -1)
    return view.update(
        plan,
        cluster,
        (*plan.reasons, *text.restored(step, max(cluster.step, reached), cluster.paused)),
        stage=Stage.TRAINING,
        since=view.now,
        opened_at=view.now,
        step=step,
        saved=step,
        proven_servers=len(servers),
    )


def leftover_deadline(view: ClusterView, cluster: Cluster) -> float | None:
    """Until when the end of processes of earlier versions is waited for: as long as a chief has, and as long again.
    Called for the deadlines of the engine, and by `open_gate`."""
    if cluster.stage is not Stage.STARTING or cluster.servers_ready_at is None:
        return None
    chief_since = max((task.since for task in tasks_of(cluster, Role.CHIEF)), default=cluster.servers_ready_at)
    return max(cluster.servers_ready_at, chief_since) + 2 * view.limits.ready_timeout
