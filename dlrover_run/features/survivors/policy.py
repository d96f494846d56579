"""Survivors of a round as a policy: it changes no decision about rounds. It chooses the store of each round, and sends
the handles of all workers to all nodes once every worker has offered one.

What a node does with its workers meanwhile is `node.next_step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from dlrover_run.coordination.decision import Decision, update_plan
from dlrover_run.coordination.membership import Members, MemberState
from dlrover_run.coordination.model import NodeKey, NodePhase, Plan, PlanPhase, RankAssignment
from dlrover_run.coordination.policy import Policy
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


class SurvivorsPolicy(Policy):
    """Forms the process group of each round in place where all workers of the round can."""

    def begin(self, plan: Plan, ranked: Sequence[MemberState], nodes: Sequence[MemberState], now: float) -> Plan | None:
        """The plan with the store of the next round, if that is another one than before."""
        store = choose_store(SurvivorsState.get(plan.parts).store, ranked)
        return None if store == SurvivorsState.get(plan.parts).store else _update(plan, now, store=store)

    def refresh(self, plan: Plan, members: Members, now: float) -> Decision:
        """Say how the workers of the round form their group, once that is known."""
        state = SurvivorsState.get(plan.parts)
        if plan.phase is not PlanPhase.TRAINING or (state.formation and state.formation.key == plan.key):
            return Decision(plan)
        why_not = reasons_against(plan, members)
        if why_not:
            lines = () if why_not == state.why_not else (render(why_not),)
            formation = Formation(plan.key)
            return Decision(_update(plan, now, formation=formation, why_not=why_not), log_lines=lines)
        parts = offers(plan, members)
        if parts is None:
            return Decision(plan)
        uuid = uuid_of(plan.key)
        assert uuid is not None, "a round without one has a reason against"
        formation = Formation(plan.key, uuid, tuple(handle for part in parts for handle in part.handles))
        kept, of = sum(part.kept for part in parts), len(formation.handles)
        text = render((SurvivorsCode.KEPT(round=plan.key.number, kept=kept, of=of),))
        lines = (text,) if kept else ()
        return Decision(_update(plan, now, formation=formation, why_not=()), log_lines=lines)

    def end_round(self, plan: Plan) -> Plan:
        if SurvivorsState.get(plan.parts).formation is None:
            return plan
        return _update(plan, plan.clock, formation=None)

    def recover(self, plan: Plan, members: Members) -> Plan:
        """The plan with the store that the workers of its round have. Their group follows from their reports."""
        here = (state for member in plan.members if (state := members.get(member.key)) is not None)
        parts = (SurvivorsReport.find(state.report.parts) for state in here if state.report.in_round(plan.key))
        store = next((part.store for part in parts if part is not None and part.store is not None), None)
        return plan if store is None else _update(plan, plan.clock, store=store)

    def tasks(self, plan: Plan, ranks: Mapping[NodeKey, RankAssignment]) -> Mapping[NodeKey, SurvivorsAssignment]:
        """How the workers of the round find each other, for each of its nodes."""
        state, rules = SurvivorsState.get(plan.parts), SurvivorsRules.get(self.rules.parts)
        formation = state.formation if state.formation and state.formation.key == plan.key else None
        part = SurvivorsAssignment(plan.key, state.store, formation, rules.reconfigure_timeout, rules.start_timeout)
        return dict.fromkeys(ranks, part)


def choose_store(before: Store | None, ranked: Sequence[MemberState]) -> Store | None:
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


def reasons_against(plan: Plan, members: Members) -> Reasons:
    """Why the group of the round cannot be formed in place; empty as long as nothing is known that prevents it.

    One worker that cannot take part is enough. A process group has members of one kind only, and the ranks and the
    world size that the workers of a round were given are those of all of them.
    """
    workers = sum(member.workers for member in plan.members)
    if uuid_of(plan.key) is None:
        return (SurvivorsCode.NO_UUID(round=plan.key.number),)
    if workers > MAX_GROUP:
        return (SurvivorsCode.TOO_LARGE(workers=workers, most=MAX_GROUP),)
    has_store = SurvivorsState.get(plan.parts).store is not None
    for rank, member in enumerate(plan.members):
        state = members.get(member.key)
        # A node that leaves reports nothing of its workers any more.
        if state is None or not _works_in(state, plan):
            continue
        name, part = node_name(member.host, rank), SurvivorsReport.find(state.report.parts)
        # Each node with the flag offers a store, so there is none only where no node had the flag when the round began.
        if part is None or not has_store:
            return (SurvivorsCode.WITHOUT(node=name),)
        if part.key == plan.key and part.unable:
            # The one without a block is named itself, and need not be on this node.
            is_named = SurvivorsCode.NO_BLOCK.within(part.unable)
            return part.unable if is_named else (SurvivorsCode.UNABLE(node=name), *part.unable)
    return ()


def offers(plan: Plan, members: Members) -> list[SurvivorsReport] | None:
    """The parts of all nodes of the round, in the order of their ranks, once all of their workers have offered handles
    for it; None before that. The handles of a node that is away, or that has failed, may be those of dead workers."""
    found: list[SurvivorsReport] = []
    for member in plan.members:
        state = members.get(member.key)
        part = SurvivorsReport.find(state.report.parts) if state is not None and _works_in(state, plan) else None
        if part is None or part.key != plan.key or len(part.handles) != member.workers:
            return None
        found.append(part)
    handles = [handle for part in found for handle in part.handles]
    return found if len(set(handles)) == len(handles) else None


def _works_in(state: MemberState, plan: Plan) -> bool:
    """Whether the node is connected, and its workers of the round of the plan run."""
    return state.connected and state.report.in_round(plan.key) and state.report.phase is NodePhase.RUNNING


def _update(plan: Plan, now: float, **changes: Any) -> Plan:
    return update_plan(plan, now, part=replace(SurvivorsState.get(plan.parts), **changes))


POLICY = SurvivorsPolicy
