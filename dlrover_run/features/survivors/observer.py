"""How the workers of each round form their group: chooses the store of the round, and sends the handles of all workers
to all nodes once every worker has offered one.

What a node does with its workers meanwhile is `node.next_step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from dlrover_run.coordination.membership import KnownNode, Nodes
from dlrover_run.coordination.observer import Observation, Observer
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodePhase
from dlrover_run.coordination.records.round import NodeKey, RankAssignment
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.survivors.model import (
    MAX_GROUP,
    Formation,
    Store,
    SurvivorsAssignment,
    SurvivorsReport,
    SurvivorsState,
    uuid_of,
)
from dlrover_run.features.survivors.rules import SurvivorsRules
from dlrover_run.features.survivors.text import SurvivorsCode
from dlrover_run.words.reasons import Reasons, render
from dlrover_run.words.text import node_name


class SurvivorsObserver(Observer):
    """Forms the process group of each round in place where all workers of the round can."""

    def __init__(self, rules: JobRules) -> None:
        self._limits = SurvivorsRules.get(rules.parts)

    def observe(self, plan: Plan, nodes: Nodes, now: float) -> Observation:
        """The store of a round that has just begun; then how its workers form their group, once that is known."""
        before = SurvivorsState.get(plan.parts)
        if plan.phase is not PlanPhase.TRAINING:
            return _changed(before, replace(before, formation=None))
        if before.formation is not None and before.formation.key == plan.key:
            return Observation()
        state = before
        if before.chosen_for != plan.key:
            ranked = [nodes[member.key] for member in plan.members if member.key in nodes]
            state = replace(before, chosen_for=plan.key, store=choose_store(before.store, ranked))
        why_not = reasons_against(plan, state, nodes)
        if why_not:
            lines = () if why_not == state.why_not else (render(why_not),)
            return Observation(replace(state, formation=Formation(plan.key), why_not=why_not), log_lines=lines)
        parts = offers(plan, nodes)
        if parts is None:
            return _changed(before, state)
        uuid = uuid_of(plan.key)
        assert uuid is not None, "a round without one has a reason against"
        formation = Formation(plan.key, uuid, tuple(handle for part in parts for handle in part.handles))
        kept, of = sum(part.kept for part in parts), len(formation.handles)
        text = render((SurvivorsCode.KEPT(round=plan.key.number, kept=kept, of=of),))
        lines = (text,) if kept else ()
        return Observation(replace(state, formation=formation, why_not=()), log_lines=lines)

    def recovered(self, plan: Plan, nodes: Nodes) -> SurvivorsState | None:
        """The store that the workers of the round have. Their group follows from their reports."""
        here = (state for member in plan.members if (state := nodes.get(member.key)) is not None)
        parts = (SurvivorsReport.find(state.report.parts) for state in here if state.report.in_round(plan.key))
        store = next((part.store for part in parts if part is not None and part.store is not None), None)
        return None if store is None else SurvivorsState(store, plan.key)

    def orders(self, plan: Plan, ranks: Mapping[NodeKey, RankAssignment]) -> Mapping[NodeKey, SurvivorsAssignment]:
        """How the workers of the round find each other, for each of its nodes."""
        state, limits = SurvivorsState.get(plan.parts), self._limits
        formation = state.formation if state.formation and state.formation.key == plan.key else None
        part = SurvivorsAssignment(plan.key, state.store, formation, limits.reconfigure_timeout, limits.start_timeout)
        return dict.fromkeys(ranks, part)


def choose_store(before: Store | None, ranked: Sequence[KnownNode]) -> Store | None:
    """The store of a round of these nodes, in the order of their ranks: the one before as long as its node runs it,
    because workers cannot change theirs; else that of the first node. A coordinator that has lost its
    records finds the one before in the reports."""
    offered: list[Store] = []
    known = [before]
    for state in ranked:
        report, part = state.report, SurvivorsReport.find(state.report.parts)
        if part is not None:
            offered.append(Store(report.node_id, report.incarnation, report.address, part.port))
        if part is not None and before is None:
            known.append(part.store)
    return next((store for store in (*known, *offered) if store in offered), None)


def reasons_against(plan: Plan, state: SurvivorsState, nodes: Nodes) -> Reasons:
    """Why the group of the round cannot be formed in place; empty as long as nothing is known that prevents it.

    One worker that cannot take part is enough. A process group has members of one kind only, and the ranks and the
    world size that the workers of a round were given are those of all of them.
    """
    workers = sum(member.workers for member in plan.members)
    if uuid_of(plan.key) is None:
        return (SurvivorsCode.NO_UUID(round=plan.key.number),)
    if workers > MAX_GROUP:
        return (SurvivorsCode.TOO_LARGE(workers=workers, most=MAX_GROUP),)
    for rank, member in enumerate(plan.members):
        node = nodes.get(member.key)
        # A node that leaves reports nothing of its workers any more.
        if node is None or not _works_in(node, plan):
            continue
        name, part = node_name(member.host, rank), SurvivorsReport.find(node.report.parts)
        # Each node with the flag offers a store, so there is none only where no node had the flag when the round began.
        if part is None or state.store is None:
            return (SurvivorsCode.WITHOUT(node=name),)
        if part.key == plan.key and part.unable:
            # The one without a block is named itself, and need not be on this node.
            is_named = SurvivorsCode.NO_BLOCK.within(part.unable)
            return part.unable if is_named else (SurvivorsCode.UNABLE(node=name), *part.unable)
    return ()


def offers(plan: Plan, nodes: Nodes) -> list[SurvivorsReport] | None:
    """The parts of all nodes of the round, in the order of their ranks, once all of their workers have offered handles
    for it; None before that. The handles of a node that is away, or that has failed, may be those of dead workers."""
    found: list[SurvivorsReport] = []
    for member in plan.members:
        state = nodes.get(member.key)
        part = SurvivorsReport.find(state.report.parts) if state is not None and _works_in(state, plan) else None
        if part is None or part.key != plan.key or len(part.handles) != member.workers:
            return None
        found.append(part)
    handles = [handle for part in found for handle in part.handles]
    return found if len(set(handles)) == len(handles) else None


def _works_in(state: KnownNode, plan: Plan) -> bool:
    """Whether the node is connected, and its workers of the round of the plan run."""
    return state.connected and state.report.in_round(plan.key) and state.report.phase is NodePhase.RUNNING


def _changed(before: SurvivorsState, state: SurvivorsState) -> Observation:
    return Observation(None if state == before else state)


OBSERVER = SurvivorsObserver
