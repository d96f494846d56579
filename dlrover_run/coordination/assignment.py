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
from dlrover_run.policies.parameter_servers.model import NodeOrder
from dlrover_run.policies.registry import policy_of


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
    ranks = rank_assignments(plan) if plan.cluster is None else {}
    given = policy_of(rules).tasks(plan, ranks)
    return {key: NodeView(ranks=ranks.get(key), **given.get(key, {})) for key in dict.fromkeys([*ranks, *given])}


def view_of(rules: JobRules, plan: Plan, found: Mapping[NodeKey, NodeView], key: NodeKey) -> NodeView:
    """The part of one node among those of the plan, or the answer to a request of a node that has none."""
    part = found.get(key, EMPTY_VIEW)
    answer = {} if part.cluster is not None else policy_of(rules).answer(plan, key)
    return NodeView(**answer) if answer else part


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
