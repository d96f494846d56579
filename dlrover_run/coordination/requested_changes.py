"""What follows from a request of an operator. Pure.

A request becomes part of the plan at the next decision and is then as durable as the plan. The nodes act on it as on a
signal to their launchers, so nothing else in the core depends on it.
"""

from __future__ import annotations

import msgspec

from dlrover_run.coordination.decision import end_job
from dlrover_run.coordination.job import Job
from dlrover_run.coordination.membership import Members
from dlrover_run.coordination.model import OVER, NodeKey, Plan, PlanPhase
from dlrover_run.coordination.policy import Accepted
from dlrover_run.coordination.requests import Action, OperatorRequest, RequestFailed
from dlrover_run.coordination.rules import DesiredSize, JobRules
from dlrover_run.words.reasons import Code
from dlrover_run.words.text import counted

MAX_DRAINING = 1000
"""Nodes that drain at one time; of more the first."""


def find_nodes(plan: Plan, members: Members, name: str) -> tuple[NodeKey, ...]:
    """The nodes that are here and have this rank, host or id. Raises RequestFailed if there is none, or if nodes share
    the host of this name."""
    here = {key: p for key, p in members.items() if not p.has_left}
    ranked = {str(rank): member.key for rank, member in enumerate(plan.members) if plan.phase is PlanPhase.TRAINING}
    if ranked.get(name) in here:
        return (ranked[name],)
    found = [key for key, p in here.items() if name in (p.report.host, key.node_id)]
    if len({key.node_id for key in found}) > 1:
        ranks = sorted(rank for rank, key in ranked.items() if key in found)
        raise RequestFailed(f"{len(found)} nodes are named {name}; give a node rank, such as {', '.join(ranks[:3])}")
    if not found:
        raise RequestFailed(f"no node of the job has the rank, the host or the id {name}")
    return tuple(found)


def apply_request(
    rules: JobRules, job: Job, plan: Plan, members: Members, request: OperatorRequest, now: float
) -> Accepted:
    """What follows from a request to a job that was started with these rules. Raises RequestFailed."""
    if plan.phase in OVER:
        raise RequestFailed("the job is over")
    if request.action is Action.STOP:
        reason = Code.STOPPED_ON_REQUEST(by=request.by or "an operator")
        stopped = end_job(msgspec.structs.replace(plan, failure=None), now, PlanPhase.FAILED, (reason,)).plan
        return Accepted(job.policy.end_job(stopped, now))
    if request.action is Action.SCALE:
        if request.part is None and job.policy.has_rounds:
            size = desired_size(rules, plan, members, request)
            return Accepted(msgspec.structs.replace(plan, clock=now, desired=size))
        given = request.part and job.policy.scale(plan, members, request.part, request.by or "an operator", now)
        if not given:
            program = rules.program
            raise RequestFailed(f"it was started with {program}; change its size with {program} scale")
        return given
    wanted = find_nodes(plan, members, request.node)
    # Of a round that runs they leave with the next planned change. Tasks without a round are moved by their policy.
    waits = job.policy.has_rounds and plan.phase is PlanPhase.TRAINING
    later = {member.key for member in plan.members} if waits else set()
    draining = [key for key in (*plan.draining, *(key for key in wanted if key not in later)) if key in members]
    to_drain = [key for key in (*plan.to_drain, *(key for key in wanted if key in later)) if key in members]
    drained = msgspec.structs.replace(
        plan,
        clock=now,
        draining=tuple(dict.fromkeys(draining))[:MAX_DRAINING],
        to_drain=tuple(dict.fromkeys(key for key in to_drain if key not in draining))[:MAX_DRAINING],
    )
    return Accepted(drained)


def desired_size(rules: JobRules, plan: Plan, members: Members, request: OperatorRequest) -> DesiredSize | None:
    """The size that a request asks for; None for that with which the job was started. Raises RequestFailed."""
    least, most = request.min_nodes or rules.min_nodes, request.max_nodes or rules.max_nodes
    if not rules.min_nodes <= least <= most <= rules.max_nodes:
        given = f"{least}:{most}" if request.min_nodes else str(most)
        raise RequestFailed(f"it was started with --nnodes={rules.min_nodes}:{rules.max_nodes}, which excludes {given}")
    chooses = any(part.applies and part.chooses_size for part in rules.parts)
    fixed = chooses and bool(request.max_nodes) and not request.min_nodes
    size = DesiredSize(least, most, request.by, fixed)
    if (problem := rules.resized(size).problem()) is not None:
        raise RequestFailed(problem)
    if plan.phase is PlanPhase.TRAINING:
        if any(one.done or ((p := members.get(one.key)) and p.succeeded_in(plan.key)) for one in plan.members):
            raise RequestFailed("workers have succeeded already, so no further round is planned")
        here = sum(p.is_available for p in members.values())
        if not rules.resized(size).size(here):
            raise RequestFailed(f"only {counted(here, 'node')} {'is' if here == 1 else 'are'} here")
    return None if (least, most) == (rules.min_nodes, rules.max_nodes) and not fixed else size
