"""How many servers and workers the job shall have: what the user requests while it runs, and what its tables allow.

A table that is looked up with `partition_strategy="mod"` can be restored only with as many parts as it was saved with,
and only the script knows how many parts it makes. So the chief reports which numbers of servers are safe, and does not
restore a checkpoint whose parts differ from those of its graph.
"""

from __future__ import annotations

import msgspec

from dlrover_run.coordination.engine import Accepted
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.requests import RequestFailed
from dlrover_run.words.reasons import Reason, Reasons, chain, render
from tf_ps_runner.cluster import text
from tf_ps_runner.cluster.budgets import may_try_servers
from tf_ps_runner.cluster.model import (
    Cluster,
    DesiredReplicas,
    EndCause,
    PlannedTask,
    Role,
    ScaleRequest,
    ServerBounds,
    TaskEnd,
)
from tf_ps_runner.cluster.placement import all_slots, replica_bounds
from tf_ps_runner.cluster.reshape import LEAVING_STAGES
from tf_ps_runner.cluster.rules import ROLES, ClusterRules, Loss
from tf_ps_runner.cluster.text import ClusterCode
from tf_ps_runner.cluster.versions import begin_version, fail
from tf_ps_runner.cluster.view import ClusterView, LostTask, tasks_of


def scale(view: ClusterView, plan: Plan, request: ScaleRequest, by: str) -> Accepted:
    """What follows from a request, which is granted or refused as a whole. Raises RequestFailed."""
    cluster = Cluster.get(plan.parts)
    refusal = _refusal(view, plan, cluster, request)
    if not refusal and (refusal := _too_few_slots(view, plan, cluster, request)):
        # It will be known in a moment whether the node whose connection has just broken comes back.
        away = view.pending_reconnect(plan) is not None
        refusal = (*refusal, ClusterCode.MAY_RECONNECT()) if away else refusal
    if refusal:
        raise RequestFailed(render(chain(refusal)))
    ps, workers = (
        None if role in request.auto else cluster.desired.of(role) if request.of(role) is None else request.of(role)
        for role in (Role.PS, Role.WORKER)
    )
    requested = (ClusterCode.REQUEST(by=by, replicas=request.text),)
    scaled = view.update(plan, cluster, requested, desired=DesiredReplicas(ps, workers))
    return Accepted(scaled, chain(_consequences(view, plan, cluster, request)))


def _refusal(view: ClusterView, plan: Plan, cluster: Cluster, request: ScaleRequest) -> Reasons:
    """Why the job cannot do that, whatever its capacity; empty when it can."""
    if problem := out_of_range(request, view.limits):
        return problem
    if request.ps is None:
        return ()
    if cluster.server_bounds is not None and not cluster.server_bounds.allow(request.ps):
        return (text.bounded(cluster.server_bounds),)
    current = len(tasks_of(cluster, Role.PS))
    trains = plan.phase is PlanPhase.TRAINING
    if trains and request.ps != current and not may_try_servers(view.limits, cluster):
        return (ClusterCode.SERVERS_NOT_TRIED(present=current),)
    return ()


def out_of_range(request: ScaleRequest, limits: ClusterRules) -> Reasons:
    """Why the job was not started with such numbers; empty when it was."""
    for role, spec in ROLES.items():
        number, (least, most) = request.of(role), limits.replicas(role)
        if number is not None and not least <= number <= most:
            code = ClusterCode.OUT_OF_FIXED if least == most else ClusterCode.OUT_OF_RANGE
            return (code(flag=spec.flag, wanted=number, least=least, most=most),)
    return ()


def _too_few_slots(view: ClusterView, plan: Plan, cluster: Cluster, request: ScaleRequest) -> Reasons:
    """What a running version has too few slots for; one that gathers uses the slots that there are then."""
    if plan.phase is not PlanPhase.TRAINING:
        return ()
    short = []
    for role in ROLES:
        succeeded, found = cluster.role_state(role).succeeded, all_slots(view, role)
        needed = sum(rank not in succeeded for rank in range(request.of(role) or 0))
        if found < needed:
            short.append(text.replicas(role, found))
    return (ClusterCode.NO_SLOTS(slots=" and ".join(short)),) if short else ()


def _consequences(view: ClusterView, plan: Plan, cluster: Cluster, request: ScaleRequest) -> Reasons:
    """What the job does now that it grants the request."""
    reasons: list[Reason] = []
    for role, spec in ROLES.items():
        number = request.of(role)
        if role in request.auto:
            least, most = replica_bounds(view.limits, cluster, role)
            reasons.append(
                (ClusterCode.GIVEN_BACK if cluster.choice is None else ClusterCode.CHOOSES)(
                    role=spec.label, least=least, most=most
                )
            )
        if number is None:
            continue
        current, is_set = len(tasks_of(cluster, role)), spec.loss is Loss.NEW_VERSION
        if plan.phase is not PlanPhase.TRAINING:
            code = ClusterCode.WHEN_IT_TRAINS
        elif is_set and cluster.stage in LEAVING_STAGES:
            code = ClusterCode.NEXT_SET_FITS if number == len(cluster.next_servers) else ClusterCode.NEW_SET
        elif number == current:
            code = ClusterCode.ALREADY_THERE
        else:
            code = ClusterCode.NEW_SET if is_set else ClusterCode.WORKERS_CHANGE
        reasons.append(code(replicas=text.replicas(role, number), number=number, slots=all_slots(view, role)))
    return tuple(reasons)


def bound_servers(view: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """The plan with the bounds that the chief has reported; with a version of another number of servers, or the end of
    the job, where the chief did not restore the model."""
    for chief in tasks_of(cluster, Role.CHIEF):
        status = view.status_of(chief)
        bounds = status.server_bounds if status is not None else None
        if bounds is None:
            continue
        if bounds.refused:
            return _with_other_servers(view, plan, cluster, chief, bounds)
        bounds = _narrowed(cluster.server_bounds, bounds)
        if bounds != cluster.server_bounds:
            return view.update(plan, cluster, server_bounds=bounds)
    return None


def _narrowed(known: ServerBounds | None, reported: ServerBounds) -> ServerBounds:
    """What both allow. A bound that was learned from a refusal stays, because the chief cannot know it beforehand."""
    if known is None:
        return reported
    least, most = max(known.least, reported.least), min(known.most, reported.most)
    if (least, most) == (known.least, known.most) or least > most:
        return known
    return msgspec.structs.replace(reported, least=least, most=most)


def _with_other_servers(
    view: ClusterView, plan: Plan, cluster: Cluster, chief: PlannedTask, bounds: ServerBounds
) -> Plan:
    """The plan with the number of servers that the model was trained with, or else with the number that the chief has
    computed. The same number is never tried twice."""
    if view.pending_reconnect(plan) is not None:
        return plan
    limits, known, present = view.limits, cluster.server_bounds, len(tasks_of(cluster, Role.PS))
    number = cluster.proven_servers if cluster.proven_servers not in (0, present) else bounds.least
    was_tried = known is not None and known.least == known.most == present
    code = ClusterCode.PARTS_DIFFER if bounds.parts else ClusterCode.PARTS_UNKNOWN
    refused = code(table=bounds.table, parts=bounds.parts, refused=bounds.refused, present=present)
    remedy: Reasons = ()
    if number in (0, present) or was_tried:
        remedy = (ClusterCode.AS_WHEN_WRITTEN(),)
    elif not limits.min_ps <= number <= limits.max_ps:
        remedy = (ClusterCode.START_WITH(number=number),)
    loss = LostTask(chief, TaskEnd(EndCause.FAILURE, render((refused, *remedy))))
    if remedy:
        return fail(view, plan, cluster, text.lost_tasks([loss]), loss)
    exact = msgspec.structs.replace(bounds, least=number, most=number, refused=0)
    why = (*text.lost_tasks([loss]), ClusterCode.SERVERS_NEEDED(number=number))
    return begin_version(view, plan, msgspec.structs.replace(cluster, server_bounds=exact), why, rolled_back=True)
