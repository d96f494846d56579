"""Which nodes a job without a round misses, as far as that is known. Pure."""

from __future__ import annotations

import itertools

from dlrover_run.coordination.membership import MemberState
from dlrover_run.coordination.model import Plan
from dlrover_run.coordination.rules import JobRules
from dlrover_run.words.reasons import Code, Reasons, shown_names
from dlrover_run.words.text import node_name


def is_quorum_lacking(plan: Plan, alive: list[MemberState]) -> bool:
    """Whether nodes are not here that another master may have: members of the last round or, if they are not known, so
    many nodes. A node whose connection has ended may be with the other master already."""
    if not plan.quorum:
        return False
    members = {member.key for member in plan.members if not member.done}
    if not members:
        return sum(state.connected for state in alive) < plan.quorum
    return sum(state.report.key in members for state in alive) < plan.quorum


def missing_nodes(rules: JobRules, plan: Plan, alive: list[MemberState]) -> Reasons:
    """Which nodes are missing, if that is known: members of the last round, or node ranks that users gave."""
    here = {state.report.key for state in alive}
    if plan.members:
        missing = [node_name(one.host, rank) for rank, one in enumerate(plan.members) if one.key not in here]
        return (Code.MISSING(names=shown_names(missing)),) if missing else ()
    preferred = {rank for state in alive if (rank := state.report.preferred_rank) is not None and rank < rules.min_size}
    if not alive or any(state.report.preferred_rank is None for state in alive):
        return ()
    # A job may have a hundred thousand nodes, and this is computed again and again.
    first = itertools.islice((rank for rank in range(rules.min_size) if rank not in preferred), 3)
    names = shown_names([f"node {rank}" for rank in first], rules.min_size - len(preferred))
    return (Code.MISSING(names=names),) if names else ()
