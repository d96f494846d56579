"""What a coordinator sends to one node: the part of the plan that concerns it, and what all nodes receive alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from dlrover_run.coordination.decide import Job
from dlrover_run.coordination.membership import Nodes
from dlrover_run.coordination.records.assignment import (
    MAX_PEERS,
    MAX_SUCCESSORS,
    Assignment,
    AssignmentPart,
    NodeView,
    Peer,
    Waiting,
)
from dlrover_run.coordination.records.parts import combine
from dlrover_run.coordination.records.plan import OVER, Plan, PlanPhase
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.coordination.rounds.recovery import latest_round

EMPTY_VIEW = NodeView()
"""The part of a node that the plan does not know."""


def node_views(job: Job, plan: Plan) -> dict[NodeKey, NodeView]:
    """The part of each node that has one."""
    ranks = job.engine.ranks(plan)
    given: dict[NodeKey, tuple[AssignmentPart, ...]] = {}
    for orders in (job.engine.orders, *(observer.orders for observer in job.observers.values())):
        for key, part in orders(plan, ranks).items():
            given[key] = combine(given.get(key, ()), (part,))
    drained = frozenset(plan.draining)
    return {
        key: NodeView(ranks=ranks.get(key), parts=given.get(key, ()), drains=key in drained)
        for key in dict.fromkeys([*ranks, *given, *plan.draining])
    }


def choose_peers(keys: Sequence[NodeKey], nodes: Nodes) -> dict[NodeKey, tuple[Peer, ...]]:
    """For each of these nodes, in the order of their ranks, at most MAX_PEERS connected ones on other machines: its
    neighbours, and one far from them, which hardly shares a rack."""
    here = [
        (key, state.report)
        for key in keys
        if (state := nodes.get(key)) is not None and state.connected and state.report.address
    ]
    found: dict[NodeKey, tuple[Peer, ...]] = {}
    for index, (key, report) in enumerate(here):
        near = (here[(index + step) % len(here)][1] for step in (1, -1, len(here) // 2))
        others = dict.fromkeys(Peer(other.address, other.port) for other in near if other.address != report.address)
        if others:
            found[key] = tuple(others)[:MAX_PEERS]
    return found


def choose_successors(plan: Plan, nodes: Nodes) -> tuple[str, ...]:
    """The addresses of the first MAX_SUCCESSORS machines of the round, in the order of their ranks."""
    found: dict[str, None] = {}
    for member in plan.members:
        state = nodes.get(member.key)
        if state is not None and state.connected and state.report.address:
            found.setdefault(state.report.address)
        if len(found) == MAX_SUCCESSORS:
            break
    return tuple(found)


def with_peers(views: Mapping[NodeKey, NodeView], nodes: Nodes) -> dict[NodeKey, NodeView]:
    """The parts of nodes that have something to run, with the peers of each."""
    peers = choose_peers([key for key, view in views.items() if not view.waits], nodes)
    return {key: msgspec.structs.replace(view, peers=peers.get(key, ())) for key, view in views.items()}


def build_assignment(plan: Plan, part: NodeView, waiting: Waiting | None) -> Assignment:
    """What the plan asks of the node whose part that is; `waiting` is for those that wait, unless all is over."""
    return with_view(common_assignment(plan), part, waiting if plan.phase not in OVER else None)


def common_assignment(plan: Plan) -> Assignment:
    """What all nodes receive alike."""
    return Assignment(
        epoch=plan.epoch,
        phase=plan.phase,
        key=plan.key,
        restart_count=plan.restart_count,
        reasons=plan.reasons,
        failure=plan.failure,
        change=plan.change,
    )


def with_view(common: Assignment, part: NodeView, waiting: Waiting | None) -> Assignment:
    """The assignment that all nodes have in common, with one node's part in it; `waiting` is for those that wait."""
    waiting = waiting if part.waits else None
    return msgspec.structs.replace(common, waiting=waiting, **msgspec.structs.asdict(part))


_NOT_SENT_APART = frozenset(
    {
        "epoch",
        "clock",
        "since",
        "restart_times",
        "early_failures",
        "failure",
        "reasons",
        "to_drain",
        "saves",
        "change",
        "desired",
        "quorum",
    }
)
"""Fields of a plan from which no node's own part is made: they are sent to all nodes alike, or to none."""

_SENT_APART = tuple(field for field in Plan.__struct_fields__ if field not in _NOT_SENT_APART)


def affects_nodes(before: Plan, plan: Plan) -> bool:
    """Whether a node's own part may have changed. A new field of the plan counts, unless it is named above."""
    pairs = ((getattr(before, field), getattr(plan, field)) for field in _SENT_APART)
    return any(one is not other and one != other for one, other in pairs)


def continued_assignment(job: Job, plan: Plan, report: NodeReport, waiting: Waiting | None) -> Assignment:
    """The assignment with which a node continues what the last coordinator that it obeyed assigned to it."""
    ranks = report.ranks
    continued = job.engine.continued(report)
    works = ranks is not None or continued is not None
    return Assignment(
        epoch=plan.epoch,
        phase=PlanPhase.TRAINING if works else PlanPhase.GATHERING,
        key=latest_round(report),
        restart_count=report.restart_count,
        reasons=plan.reasons,
        ranks=ranks,
        waiting=None if works else waiting,
        parts=() if continued is None else (continued,),
    )
