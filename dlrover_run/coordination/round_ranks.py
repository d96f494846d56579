"""The ranks that the nodes have in the round of a plan."""

from __future__ import annotations

from dlrover_run.coordination.model import NodeKey, Plan, PlanPhase, RankAssignment


def rank_assignments(plan: Plan) -> dict[NodeKey, RankAssignment]:
    """The ranks of each node in the plan's round; no node has any unless the job trains."""
    if plan.phase is not PlanPhase.TRAINING:
        return {}
    world_size = sum(member.workers for member in plan.members)
    roles: dict[str, int] = {}
    for member in plan.members:
        roles[member.role] = roles.get(member.role, 0) + member.workers
    found: dict[NodeKey, RankAssignment] = {}
    first_rank = 0
    next_in_role = dict.fromkeys(roles, 0)
    for node_rank, member in enumerate(plan.members):
        found[member.key] = RankAssignment(
            key=plan.key,
            restart_count=plan.restart_count,
            node_rank=node_rank,
            nodes=len(plan.members),
            workers=member.workers,
            first_rank=first_rank,
            world_size=world_size,
            role_first_rank=next_in_role[member.role],
            role_world_size=roles[member.role],
            store_address=plan.store_address,
            store_port=plan.store_port,
        )
        first_rank += member.workers
        next_in_role[member.role] += member.workers
    return found
