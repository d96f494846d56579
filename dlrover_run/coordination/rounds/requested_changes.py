"""What follows from a request of an operator. Pure.

A request becomes part of the plan at the next decision and is then as durable as the plan. The nodes act on it as on a
signal to their launchers, so nothing else in the core depends on it.
"""

from __future__ import annotations

from collections.abc import Container

import msgspec

from dlrover_run.coordination.decision import end_job
from dlrover_run.coordination.membership import Nodes
from dlrover_run.coordination.records.plan import OVER, Plan, PlanPhase
from dlrover_run.coordination.records.requests import OperatorRequest, RequestFailed
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.coordination.records.rules import DesiredSize, JobRules
from dlrover_run.words.reasons import Code
from dlrover_run.words.text import counted

MAX_DRAINING = 1000
"""Nodes that drain at one time; of more the first."""


def find_nodes(plan: Plan, nodes: Nodes, name: str) -> tuple[NodeKey, ...]:
    """The nodes that are here and have this rank, host or id. Raises RequestFailed if there is none, or if nodes share
    the host of this name."""
    here = {key: p for key, p in nodes.items() if not p.has_left}
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


def stop(plan: Plan, request: OperatorRequest, now: float) -> Plan:
    """The plan of a job that an operator stops. Raises RequestFailed."""
    if plan.phase in OVER:
        raise RequestFailed("the job is over")
    reason = Code.STOPPED_ON_REQUEST(by=request.by or "an operator")
    return end_job(plan, now, PlanPhase.FAILED, (reason,), failure=None)


def drain(plan: Plan, nodes: Nodes, request: OperatorRequest, later: Container[NodeKey], now: float) -> Plan:
    """The plan in which the nodes that the request names leave: at once, or those of `later` with the next planned
    change. Raises RequestFailed."""
    wanted = find_nodes(plan, nodes, request.node)
    draining = [key for key in (*plan.draining, *(key for key in wanted if key not in later)) if key in nodes]
    to_drain = [key for key in (*plan.to_drain, *(key for key in wanted if key in later)) if key in nodes]
    return msgspec.structs.replace(
        plan,
        clock=now,
        draining=tuple(dict.fromkeys(draining))[:MAX_DRAINING],
        to_drain=tuple(dict.fromkeys(key for key in to_drain if key not in draining))[:MAX_DRAINING],
    )


def change_size(rules: JobRules, plan: Plan, nodes: Nodes, request: OperatorRequest, now: float) -> Plan:
    """The plan of a job with rounds, started with these rules, that is to have another size. Raises RequestFailed."""
    if request.part is not None:
        raise RequestFailed(other_program(rules))
    return msgspec.structs.replace(plan, clock=now, desired=desired_size(rules, plan, nodes, request))


def other_program(rules: JobRules) -> str:
    """Why a request for a size that such a job does not have fails."""
    return f"it was started with {rules.program}; change its size with {rules.program} scale"


def desired_size(rules: JobRules, plan: Plan, nodes: Nodes, request: OperatorRequest) -> DesiredSize | None:
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
        if any(one.done or ((p := nodes.get(one.key)) and p.succeeded_in(plan.key)) for one in plan.members):
            raise RequestFailed("workers have succeeded already, so no further round is planned")
        here = sum(p.is_available for p in nodes.values())
        if not rules.resized(size).size(here):
            raise RequestFailed(f"only {counted(here, 'node')} {'is' if here == 1 else 'are'} here")
    return None if (least, most) == (rules.min_nodes, rules.max_nodes) and not fixed else size
