"""What of a plan concerns one node: all that a coordinator tells each node besides what it tells them all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from dlrover_run.coordination.model import (
    OVER,
    Assignment,
    NodeKey,
    Plan,
    RankAssignment,
    Waiting,
    common_assignment,
    rank_assignments,
)
from dlrover_run.coordination.rules import JobRules
from dlrover_run.policies.health.model import MAX_LINK_ROWS, MAX_ROWS, CheckTask, LinkRow, NodeHealth
from dlrover_run.policies.health.round import key_of, tasks
from dlrover_run.policies.health.text import shown
from dlrover_run.policies.parameter_servers.model import NodeOrder
from dlrover_run.policies.parameter_servers.policy import client_order, orders


class NodeView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One node's own part: the fields of its `Assignment` that no other node is told."""

    ranks: RankAssignment | None = None
    check_task: CheckTask | None = None
    health: NodeHealth | None = None
    health_table: Annotated[tuple[NodeHealth, ...], Meta(max_length=MAX_ROWS)] = ()
    link_table: Annotated[tuple[LinkRow, ...], Meta(max_length=MAX_LINK_ROWS)] = ()
    cluster: NodeOrder | None = None

    @property
    def waits(self) -> bool:
        """Whether the node has nothing to run in the job, and waits until it has."""
        return self.ranks is None and (self.cluster is None or not self.cluster.tasks)


EMPTY_VIEW = NodeView()
"""The part of a node that the plan does not know."""


def node_views(rules: JobRules, plan: Plan) -> dict[NodeKey, NodeView]:
    """The part of each node that has one."""
    if plan.cluster is not None:
        return {key: NodeView(cluster=order) for key, order in orders(plan).items()}
    found = {key: NodeView(ranks=seat) for key, seat in rank_assignments(plan).items()}
    if plan.check is None and not plan.health:
        return found
    seated = {key: part.ranks for key, part in found.items()}
    given = {} if plan.check is None or plan.phase in OVER else tasks(rules, plan.check)
    checkups = {key_of(checkup): checkup for checkup in plan.health}
    for key in {**seated, **given, **checkups}:
        found[key] = NodeView(ranks=seated.get(key), check_task=given.get(key), health=checkups.get(key))
    if seated:
        first = plan.members[0].key
        others, links = _table(plan, checkups)
        found[first] = msgspec.structs.replace(found[first], health_table=others, link_table=links)
    return found


def view_of(plan: Plan, found: Mapping[NodeKey, NodeView], key: NodeKey) -> NodeView:
    """One node's part among those of the plan. A visitor is told only what became of its wish, which the plan knows by
    its node id."""
    part = found.get(key, EMPTY_VIEW)
    answer = client_order(plan, key) if part.cluster is None else None
    return part if answer is None else NodeView(cluster=answer)


def build_assignment(plan: Plan, part: NodeView, waiting: Waiting | None) -> Assignment:
    """What the plan asks of the node whose part that is; `waiting` is for those that wait, unless all is over."""
    waits = part.waits and plan.phase not in OVER
    return with_view(common_assignment(plan, None), part, waiting if waits else None)


def with_view(told: Assignment, part: NodeView, waiting: Waiting | None) -> Assignment:
    """What all nodes are told, with one node's part in it."""
    return msgspec.structs.replace(
        told,
        ranks=part.ranks,
        waiting=waiting,
        check_task=part.check_task,
        health=part.health,
        health_table=part.health_table,
        link_table=part.link_table,
        cluster=part.cluster,
    )


def _table(plan: Plan, checkups: dict[NodeKey, NodeHealth]) -> tuple[tuple[NodeHealth, ...], tuple[LinkRow, ...]]:
    """Of all nodes, in the order of their ranks and with this one among them, what a person is shown; and the links
    between those."""
    seated = [member.key for member in plan.members if member.key in checkups]
    order = dict.fromkeys([*seated, *checkups])
    others = shown([checkups[key] for key in order])
    places = {key_of(checkup): place for place, checkup in enumerate(others)}
    links = []
    for link in plan.links:
        ends = [places.get(key_of(plan.health[end])) for end in (link.one, link.other)]
        known = sorted(end for end in ends if end is not None)
        if len(known) == 2:
            links.append(msgspec.structs.replace(link, one=known[0], other=known[1]))
    return others, tuple(links)
