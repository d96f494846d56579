"""What follows when tasks end or nodes leave: a new version for a server, a successor for any other task, and the end
of the job once the chief has succeeded."""

from __future__ import annotations

import msgspec

from dlrover_run.coordination.decision import update_plan
from dlrover_run.coordination.membership import all_have_left
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.words.reasons import chain
from tf_ps_runner.cluster import text
from tf_ps_runner.cluster.budgets import consume_restarts
from tf_ps_runner.cluster.model import Cluster, EndCause, PlannedTask, Role, Stage
from tf_ps_runner.cluster.placement import choose_node, desired_ranks, min_tasks, new_task
from tf_ps_runner.cluster.reshape import LEAVING_STAGES
from tf_ps_runner.cluster.rules import ROLES, Loss, Milestone
from tf_ps_runner.cluster.text import ClusterCode, task_keys, task_name, task_names
from tf_ps_runner.cluster.versions import begin_version, fail
from tf_ps_runner.cluster.view import ClusterView, LostTask, host_of, tasks_of, with_task, without


def lose_servers(view: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """Begin the next version when a server is lost, and with it a part of the model."""
    losses = view.losses_of(cluster, tuple(task for task in cluster.tasks if _makes_version(task)))
    if not losses:
        return None
    if view.pending_reconnect(plan) is not None:
        # Other nodes may be lost with it. That is known in a moment, and one version is enough for all.
        return plan
    cluster, problem = consume_restarts(view.limits, cluster, losses)
    if problem:
        cause = next((loss for loss in losses if loss.end == cluster.outcome), None)
        return fail(view, plan, cluster, (*text.lost_tasks(losses), *problem), cause)
    return begin_version(view, plan, cluster, text.lost_tasks(losses), rolled_back=True, losses=losses)


def replace_others(view: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """Start a successor for any other task that has ended; no other task is disturbed."""
    # One at a time, and no further one is looked for: after the end of 1,000 workers at once, 1,000 decisions follow.
    losses = (view.loss_of(cluster, task) for task in cluster.tasks if not _makes_version(task))
    loss = next((loss for loss in losses if loss is not None), None)
    return None if loss is None else _replace(view, plan, cluster, loss)


def move_from_leaving(view: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """Start tasks elsewhere whose node was asked to leave, if there are slots; servers move with a new version."""
    if cluster.stage in LEAVING_STAGES:
        return None
    with_servers = {host_of(task) for task in tasks_of(cluster, Role.PS)}
    for task in cluster.tasks:
        node = host_of(task)
        if _makes_version(task) or view.is_lost(node) or not view.is_leaving(node):
            continue
        if ROLES[task.role].loss is Loss.RESTART_IN_PLACE and (node in with_servers or _is_bound(cluster, task.role)):
            # The next version moves it.
            continue
        place = choose_node(view, without(cluster, task), task.role)
        if place is not None:
            moved, successor = new_task(view, without(cluster, task), task.role, task.rank, cluster.version, place)
            moves = ClusterCode.MOVES(successor=task_name(successor), task=task.key)
            return view.update(plan, with_task(moved, successor), (*view.departures([task]), moves))
    return None


def _makes_version(task: PlannedTask) -> bool:
    return ROLES[task.role].loss is Loss.NEW_VERSION


def _is_bound(cluster: Cluster, role: Role) -> bool:
    """Whether a task of the role can move to another node only with a new version: from the moment when the servers
    have answered, data queues on its node may be in use. Asked before such a task is moved, replaced or added."""
    return ROLES[role].loss is Loss.RESTART_IN_PLACE and cluster.servers_ready_at is not None


def _replace(view: ClusterView, plan: Plan, cluster: Cluster, loss: LostTask) -> Plan:
    task, spec = loss.task, ROLES[loss.task.role]
    rest = without(cluster, task)
    if loss.end.cause is EndCause.SUCCESS:
        state = rest.role_state(task.role)
        return view.update(plan, rest.with_role(state, succeeded=tuple(sorted({*state.succeeded, task.rank}))))
    leaves = spec.leaves_first and cluster.stage in LEAVING_STAGES
    if leaves and loss.end.cause is EndCause.RESHAPED:
        return view.update(plan, rest)
    if not loss.free and any(view.is_disconnected(host_of(server)) for server in tasks_of(cluster, Role.PS)):
        # The loss of a server may be why it ended. That is known in a moment, and would end all tasks.
        return plan
    charged, problem = consume_restarts(view.limits, cluster, [loss])
    rest, reasons = without(charged, task), text.lost_tasks([loss])
    if problem and not spec.required:
        goes_on = ClusterCode.GOES_ON_WITHOUT(role=spec.label, number=2 if spec.numbered else 1, purpose=spec.purpose)
        reasons = (*reasons, *problem, goes_on)
        return view.update(plan, _given_up(rest, task.role), reasons, outcome=None)
    if problem:
        return fail(view, plan, charged, (*reasons, *problem), loss)
    if leaves or task.rank not in desired_ranks(view.limits, rest, task.role):
        return view.update(plan, rest, reasons)
    place = choose_node(view, rest, task.role, host_of(task))
    if place is None:
        return view.update(plan, rest, (*reasons, ClusterCode.NO_SLOT()))
    if place != host_of(task) and _is_bound(cluster, task.role):
        if view.pending_reconnect(plan) is not None:
            return plan
        return begin_version(view, plan, rest, (*reasons, ClusterCode.CHIEF_MOVES()), rolled_back=True)
    rest, successor = new_task(view, rest, task.role, task.rank, cluster.version, place)
    return view.update(plan, with_task(rest, successor), (*reasons, *text.replacements([loss], [successor])))


def _given_up(cluster: Cluster, role: Role) -> Cluster:
    return cluster.with_role(cluster.role_state(role), given_up=True)


def fill(view: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """Start the tasks that are missing and for which there are slots, or end tasks of which there are too many."""
    if cluster.stage not in LEAVING_STAGES:
        dismissed = _dismiss(view, plan, cluster)
        if dismissed is not None:
            return dismissed
    added: list[PlannedTask] = []
    for role, rank in _missing(view, cluster):
        place = choose_node(view, cluster, role)
        if place is None:
            continue
        if _is_bound(cluster, role):
            if view.pending_reconnect(plan) is None:
                return begin_version(view, plan, cluster, (ClusterCode.CHIEF_FITS(),), rolled_back=True)
            continue
        cluster, task = new_task(view, cluster, role, rank, cluster.version, place)
        cluster = with_task(cluster, task)
        added.append(task)
    return view.update(plan, cluster, (ClusterCode.ADDED(tasks=task_names(added)),)) if added else None


def _missing(view: ClusterView, cluster: Cluster) -> list[tuple[Role, int]]:
    """The ranks without a task. Servers are complete in every version, and a task that would have to leave again is not
    started."""
    leaving = cluster.stage in LEAVING_STAGES
    roles = [
        role
        for role, spec in ROLES.items()
        if spec.loss is not Loss.NEW_VERSION and (spec.starts_while_leaving or not leaving)
    ]
    present = {(task.role, task.rank) for task in cluster.tasks}
    wanted = [(role, rank) for role in roles for rank in desired_ranks(view.limits, cluster, role)]
    return [place for place in wanted if place not in present]


def _dismiss(view: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    for role, spec in ROLES.items():
        if spec.loss is not Loss.RESTART or cluster.role_state(role).given_up:
            continue
        wanted = set(desired_ranks(view.limits, cluster, role))
        surplus = [task for task in tasks_of(cluster, role) if task.rank not in wanted]
        # What the end of a task costs that has ended already is still to be decided.
        extra = [task for task in surplus if view.loss_of(cluster, task) is None]
        if extra:
            too_many = ClusterCode.TOO_MANY(
                wanted=text.replicas(role, len(wanted)), number=len(wanted), extra=task_names(extra)
            )
            return view.update(plan, without(cluster, *extra), (too_many,))
    return None


def run_short(view: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """Record since when there are too few tasks of a role, and fail the job when that lasts too long. Servers are
    complete in every version."""
    if cluster.stage in LEAVING_STAGES:
        return None
    short = _first_short(view, cluster)
    if short is None:
        return view.update(plan, cluster, insufficient_since=None) if cluster.insufficient_since is not None else None
    if cluster.insufficient_since is None:
        return view.update(plan, cluster, insufficient_since=view.now)
    if view.now < cluster.insufficient_since + view.rules.pend_timeout:
        return None
    role, number, least = short
    too_few = text.too_few_tasks(role, number, least, view.rules.pend_timeout)
    return fail(view, plan, cluster, (*plan.reasons, too_few))


def _first_short(view: ClusterView, cluster: Cluster) -> tuple[Role, int, int] | None:
    """The first role with too few tasks, their number and the minimum."""
    for role, spec in ROLES.items():
        number, least = len(tasks_of(cluster, role)), min_tasks(view.limits, cluster, role)
        if spec.loss is not Loss.NEW_VERSION and number < least:
            return role, number, least
    return None


def end_job(view: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """The plan once the chief has succeeded, or once every node has left; None while neither is so."""
    if cluster.stage is Stage.ENDING:
        return _finish(view, plan, cluster)
    for chief in tasks_of(cluster, Role.CHIEF):
        if view.has_succeeded(chief):
            return view.update(
                plan,
                without(cluster, chief),
                (ClusterCode.CHIEF_SUCCEEDED(chief=chief.key, host=chief.host),),
                stage=Stage.ENDING,
                since=view.now,
                until=view.now + view.limits.end_grace,
                next_servers=(),
                next_ports_held_at=None,
                insufficient_since=None,
            )
    if all_have_left(view.nodes, view.now):
        return fail(view, plan, cluster, (ClusterCode.LEFT_BEFORE_SUCCESS(),))
    return None


def _finish(view: ClusterView, plan: Plan, cluster: Cluster) -> Plan:
    """The plan once the other tasks have ended, or their grace is over. The servers are stopped last."""
    others = [task for task in cluster.tasks if ROLES[task.role].ends_with_training]
    late = [task for task in others if _has_to_end(view, cluster, task)]
    for task in others:
        if not ROLES[task.role].required and _has_failed(view, cluster, task):
            cluster = _given_up(cluster, task.role)
    if late and cluster.until is not None and view.now < cluster.until:
        over = [task for task in others if task not in late]
        return view.update(plan, without(cluster, *over)) if over else plan
    reasons = plan.reasons
    if late:
        reasons = chain(reasons, ClusterCode.DID_NOT_END(tasks=task_keys(late), seconds=view.limits.end_grace))
    for role, spec in ROLES.items():
        if cluster.role_state(role).given_up:
            reasons = chain(reasons, ClusterCode.PURPOSE_FAILED(role=spec.label, purpose=spec.purpose))
    done = msgspec.structs.replace(cluster, until=None)
    phase = PlanPhase.FINISHED
    return update_plan(plan, view.now, phase=phase, since=view.now, part=done, reasons=reasons, failure=None)


def _has_failed(view: ClusterView, cluster: Cluster, task: PlannedTask) -> bool:
    """Whether the task has ended without success, and not because its node is lost."""
    loss = view.loss_of(cluster, task)
    return loss is not None and not loss.free and loss.end.cause not in (EndCause.SUCCESS, EndCause.RESHAPED)


def _has_to_end(view: ClusterView, cluster: Cluster, task: PlannedTask) -> bool:
    """Whether the task has a process that has still to end by itself. A task that was never let in has nothing to
    end."""
    if ROLES[task.role].ready_after is Milestone.MODEL and cluster.opened_at is None:
        return False
    return view.runs(task) and view.loss_of(cluster, task) is None
