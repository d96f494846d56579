"""Which node has which rank: in the round of a plan, and in the next one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dlrover_run.coordination.membership import KnownNode
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import Member, NodeKey, RankAssignment
from dlrover_run.words.text import node_name


def assign_ranks(before: Sequence[Member], alive: Sequence[KnownNode], size: int) -> list[KnownNode]:
    """`size` of the `alive` nodes in the order of their ranks in the next round; `before` is the last one.

    Members of the last round come before newcomers, and keep their ranks where the round has that many. A member leaves
    its rank only for its preferred rank, if no node had that: so it returns to it after a round that was too small, and
    a newcomer can have the rank of the node that it replaces. The ranks that are left go to newcomers that prefer one
    of them, then by the natural order of host and address, in which node2 comes before node10. Newcomers take part in
    the order in which they joined; the nodes that are left over are spares.
    """
    old = {member.key: rank for rank, member in enumerate(before)}
    remaining = sorted((state for state in alive if state.report.key in old), key=lambda state: old[state.report.key])
    newcomers = sorted(
        (state for state in alive if state.report.key not in old), key=lambda state: (state.joined_at, state.report.key)
    )
    chosen = [*remaining, *newcomers][:size]
    ranked: dict[int, KnownNode] = {}

    def assign(nodes: list[KnownNode], preferred: list[int | None]) -> list[KnownNode]:
        """Assign preferred ranks that are free, and return the nodes without a rank."""
        left = []
        for node, rank in zip(nodes, preferred, strict=True):
            if rank is not None and rank < size and rank not in ranked:
                ranked[rank] = node
            else:
                left.append(node)
        return left

    stayed, new = chosen[: len(remaining)], chosen[len(remaining) :]
    had = {old[node.report.key] for node in stayed}
    others = assign(
        stayed, [None if node.report.preferred_rank in had else node.report.preferred_rank for node in stayed]
    )
    others = assign(others, [old[node.report.key] for node in others])
    others += assign(new, [node.report.preferred_rank for node in new])
    free = [rank for rank in range(size) if rank not in ranked]
    ranked.update(zip(free, sorted(others, key=_place), strict=True))
    return [ranked[rank] for rank in range(size)]


def _place(node: KnownNode) -> tuple[list[tuple[int, str]], list[tuple[int, str]], float, tuple[str, str]]:
    return natural_order(node.report.host), natural_order(node.report.address), node.joined_at, node.report.key


def natural_order(text: str) -> list[tuple[int, str]]:
    """A sort key in which numbers inside a text count as numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", text) if part]


def display_names(plan: Plan, nodes: Sequence[KnownNode]) -> list[str]:
    """The names of those nodes: with the ranks of the last round, before the first round with ranks that users gave."""
    ranks = {member.key: rank for rank, member in enumerate(plan.members)}

    def rank_of(report: NodeReport) -> int | None:
        return ranks.get(report.key) if ranks else report.preferred_rank

    return [node_name(state.report.host, rank_of(state.report)) for state in nodes]


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
