"""How many nodes the successor of a lost master needs, so that no other master can form a round beside it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dlrover_run.coordination.records.plan import Plan
from dlrover_run.coordination.records.rules import JobRules

if TYPE_CHECKING:
    from dlrover_run.coordination.membership import KnownNode


class LostMaster(NamedTuple):
    """What the node that starts a successor on another machine knows of the master before it: it had `nodes` nodes, as
    many as the last round or, before the first one, as the cluster lists; `ended` of them have ended with it."""

    nodes: int
    ended: int = 0


def needed_members(members: int, min_nodes: int, ended: int) -> int:
    """How many members of the last round a successor needs before it forms another one, so that no other master can:
    more than half of those that have not `ended`. Where the old master may be alive but unreachable (`ended` is 0), the
    nodes that it could have left must also be too few for a round."""
    majority = (members - ended) // 2 + 1
    return majority if ended else max(majority, members - min_nodes + 1)


def with_quorum(plan: Plan, rules: JobRules, lost: LostMaster | None) -> Plan:
    """The plan of a successor of that master, which says how many nodes it needs before the next round; as it is for a
    coordinator that succeeds none."""
    if lost is None:
        return plan
    # Without a round, or with one whose workers have all ended, no report names the members.
    members = sum(not member.done for member in plan.members) or lost.nodes
    if not members:
        return plan
    return msgspec.structs.replace(plan, quorum=needed_members(members, rules.min_size, lost.ended))


def is_quorum_lacking(plan: Plan, alive: list[KnownNode]) -> bool:
    """Whether nodes are not here that another master may have: members of the last round or, if they are not known, so
    many nodes. A node whose connection has ended may be with the other master already."""
    if not plan.quorum:
        return False
    members = {member.key for member in plan.members if not member.done}
    if not members:
        return sum(state.connected for state in alive) < plan.quorum
    return sum(state.report.key in members for state in alive) < plan.quorum
