"""What people wish for a running job: how many servers and workers it shall have."""

from __future__ import annotations

import msgspec

from dlrover_run.coordination.decision import changed
from dlrover_run.coordination.records import Plan, PlanPhase
from dlrover_run.coordination.words import counted
from dlrover_run.policies.parameter_servers.budgets import may_try_servers
from dlrover_run.policies.parameter_servers.model import Cluster, DesiredReplicas, Role, ScaleAnswer, Stage
from dlrover_run.policies.parameter_servers.placement import rooms
from dlrover_run.policies.parameter_servers.rules import ClusterRules
from dlrover_run.policies.parameter_servers.text import bounded, servers
from dlrover_run.policies.parameter_servers.view import ClusterView, tasks_of

MAX_SCALE_ANSWERS = 1000
"""The nodes whose last wish is remembered, so that it is granted once. Older ones are forgotten first."""

MAX_ANSWER_TEXTS = 20
"""The newest wishes whose answers are kept in words, for whoever asked to read them; each visitor is a node of its own,
and goes once it has read."""


def grant(scene: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """The plan after a wish that was not heard before; None when there is none. A wish is granted as a whole or refused
    as a whole, and whoever asked is told what follows, or why nothing does."""
    heard = {wish.node_id: wish for wish in cluster.scale_answers}
    for key in sorted(scene.present):
        status = scene.present[key].status
        hosting = status.cluster
        if hosting is None or hosting.scale_request is None:
            continue
        before = heard.get(status.node_id)
        if before is not None and hosting.scale_request_number <= before.number:
            continue
        short = _short(scene, plan, cluster, hosting.scale_request)
        if short and scene.broken(plan) is not None:
            # Whether the node whose connection has just broken comes back is known in a moment.
            continue
        refusal = _problem(scene, plan, cluster, hosting.scale_request) or short
        words = f"{status.host} asked for {_asked(hosting.scale_request)}"
        targets = cluster.desired if refusal else _with_wish(cluster.desired, hosting.scale_request)
        answer = refusal or _follows(scene, plan, cluster, hosting.scale_request)
        heard.pop(status.node_id, None)
        wishes = _kept(
            [*heard.values(), ScaleAnswer(status.node_id, hosting.scale_request_number, bool(refusal), answer)]
        )
        answered = msgspec.structs.replace(cluster, desired=targets, scale_answers=wishes)
        reason = f"{words}, which is refused: {refusal}" if refusal else words
        return changed(plan, scene.now, cluster=answered, reason=reason)
    return None


def _kept(wishes: list[ScaleAnswer]) -> tuple[ScaleAnswer, ...]:
    wishes = wishes[-MAX_SCALE_ANSWERS:]
    old = [msgspec.structs.replace(wish, answer="") if wish.answer else wish for wish in wishes[:-MAX_ANSWER_TEXTS]]
    return (*old, *wishes[-MAX_ANSWER_TEXTS:])


def _with_wish(targets: DesiredReplicas, wish: DesiredReplicas) -> DesiredReplicas:
    return DesiredReplicas(
        ps=targets.ps if wish.ps is None else wish.ps,
        workers=targets.workers if wish.workers is None else wish.workers,
    )


def _problem(scene: ClusterView, plan: Plan, cluster: Cluster, wish: DesiredReplicas) -> str:
    """Why the job cannot do that, whatever room there is; empty when it can."""
    if problem := _out_of_range(wish, scene.limits):
        return problem
    if wish.ps is None:
        return ""
    if cluster.server_bounds is not None and not cluster.server_bounds.allow(wish.ps):
        return bounded(cluster)
    present = len(tasks_of(cluster, Role.PS))
    if plan.phase is PlanPhase.TRAINING and wish.ps != present and not may_try_servers(scene.limits, cluster):
        return f"new parameter servers have failed too often to be tried again, so training goes on with {present}"
    return ""


def _out_of_range(wish: DesiredReplicas, limits: ClusterRules) -> str:
    for flag, wanted, least, most in (
        ("--ps", wish.ps, limits.min_ps, limits.max_ps),
        ("--workers", wish.workers, limits.min_workers, limits.max_workers),
    ):
        if wanted is not None and not least <= wanted <= most:
            began = f"{flag}={least}" if least == most else f"{flag}={least}:{most}"
            remedy = f"start it with {flag}=MIN:MAX" if least == most else f"give {least} to {most}"
            return f"the job was started with {began}, so it cannot have {wanted}: {remedy}"
    return ""


def _short(scene: ClusterView, plan: Plan, cluster: Cluster, wish: DesiredReplicas) -> str:
    """What a version that runs has no room for, in words; one that gathers takes what room there is by then."""
    if plan.phase is not PlanPhase.TRAINING:
        return ""
    ranks = [rank for rank in range(wish.workers or 0) if rank not in cluster.succeeded_workers]
    needs = ((Role.PS, wish.ps or 0, "parameter server"), (Role.WORKER, len(ranks), "worker"))
    short = [counted(room, noun) for role, needed, noun in needs if (room := _room(scene, role)) < needed]
    return f"there is room for {' and '.join(short)} now: start more nodes first, or ask for less" if short else ""


def _room(scene: ClusterView, role: Role) -> int:
    return sum(rooms(scene, role).values())


def _asked(wish: DesiredReplicas) -> str:
    said = [] if wish.ps is None else [servers(wish.ps)]
    if wish.workers is not None:
        said.append(counted(wish.workers, "worker"))
    return "; and for ".join(said) or "nothing"


def _follows(scene: ClusterView, plan: Plan, cluster: Cluster, wish: DesiredReplicas) -> str:
    """What the job does now that it grants a wish."""
    gathers = plan.phase is not PlanPhase.TRAINING
    said = []
    if wish.ps is not None:
        said.append(f"{servers(wish.ps)}{_of_gathering(scene, Role.PS) if gathers else _of_servers(cluster, wish.ps)}")
    if wish.workers is not None:
        there = wish.workers == len(tasks_of(cluster, Role.WORKER))
        follows = _already(wish.workers) if there else ": nobody else pauses for that"
        workers = counted(wish.workers, "worker")
        said.append(f"{workers}{_of_gathering(scene, Role.WORKER) if gathers else follows}")
    return "; ".join(said)


def _of_gathering(scene: ClusterView, role: Role) -> str:
    return f", once the job trains, if there is room by then: there is room for {_room(scene, role)} now"


def _of_servers(cluster: Cluster, number: int) -> str:
    if cluster.stage in (Stage.PAUSING, Stage.SAVING):
        if number == len(cluster.next_servers):
            return ": the set that all go on with already has as many"
    elif number == len(tasks_of(cluster, Role.PS)):
        return _already(number)
    return (
        ": a new set is started while training goes on; then the workers pause, the chief saves, and all go on with "
        "the new set"
    )


def _already(number: int) -> str:
    return f" {'is' if number == 1 else 'are'} there already"
