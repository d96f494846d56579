"""The search for stalls among the nodes of a round: it sends each node what it has found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dlrover_run.coordination.membership import Nodes
from dlrover_run.coordination.observer import Observation, Observer
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.round import NodeKey, RankAssignment
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds.ranks import rank_assignments
from dlrover_run.features.hangs.search.guilt import (
    NODES_AGE_MARGIN,
    Finding,
    find_alone,
    find_stall,
    is_certain_early,
    is_held_back,
    ranks_to_restart,
)
from dlrover_run.features.hangs.search.round_detectors import ENOUGH_WITNESSES
from dlrover_run.features.hangs.search.suspects import Suspect
from dlrover_run.features.hangs.stalls.model import (
    MAX_GUILTY,
    StallAssignment,
    StallFinding,
    StallNodeReport,
    StallQuestion,
    StallState,
)
from dlrover_run.words.reasons import render
from dlrover_run.words.text import format_ranks


class StallObserver(Observer):
    """Finds out for which worker of which node all others of a round wait."""

    def __init__(self, rules: JobRules) -> None:
        pass

    def observe(self, plan: Plan, nodes: Nodes, now: float) -> Observation:
        state, before = find(plan, nodes), StallState.get(plan.parts)
        if state == before:
            return Observation()
        is_new = state.finding is not None and state.finding != before.finding
        lines = (_log_line(state.finding),) if is_new and state.finding is not None else ()
        return Observation(state, log_lines=lines)

    def orders(self, plan: Plan, ranks: Mapping[NodeKey, RankAssignment]) -> Mapping[NodeKey, StallAssignment]:
        """The finding and the question, for each node of the round."""
        state = StallState.get(plan.parts)
        if state == StallState():
            return {}
        return dict.fromkeys(ranks, StallAssignment(state.finding, state.question))


def find(plan: Plan, nodes: Nodes) -> StallState:
    """The stall of the round that runs, or what nodes are to be asked. Neither while a node is away: its workers may
    make progress.

    If all workers of some nodes, or some workers of a node, are quiet for longer than their own limits while others
    make progress, these may only save or evaluate, and the quiet ones wait for that. So all nodes are asked whether
    their workers train."""
    if plan.phase is not PlanPhase.TRAINING:
        return StallState()
    parts: dict[NodeKey, StallNodeReport] = {}
    ended: set[NodeKey] = set()
    for member in plan.members:
        state = nodes.get(member.key)
        if member.done or (state is not None and state.succeeded_in(plan.key)):
            ended.add(member.key)
            continue
        if state is None or not state.connected or not state.report.in_round(plan.key):
            return StallState()
        parts[member.key] = StallNodeReport.find(state.report.parts) or StallNodeReport()
    suspects: list[Suspect] = []
    hosts: dict[int, str] = {}
    assigned = rank_assignments(plan)
    for member in plan.members:
        ranks = assigned[member.key]
        if member.key in ended:
            here = [Suspect(rank, ended=True) for rank in range(ranks.first_rank, ranks.last_rank + 1)]
        else:
            # Only its own ranks, whatever it reports.
            here = [one for one in parts[member.key].suspects if ranks.has_rank(one.rank)]
        suspects += here
        hosts |= {one.rank: member.host for one in here}
    number = sum(part.number for part in parts.values() if part.suspects)
    if all(part.is_quiet for part in parts.values()):
        trains = any(part.trains for part in parts.values())
        finding = find_stall(suspects, trains=trains, age_margin=NODES_AGE_MARGIN)
        early = any(part.early for part in parts.values())
        if finding is None or is_held_back(finding, suspects) or (early and not is_certain_early(finding, suspects)):
            return StallState()
        return StallState(_name(plan, finding, suspects, hosts, number))
    finding = find_alone(suspects)
    if finding is None or is_held_back(finding, suspects):
        return StallState()
    question = StallQuestion(plan.key, number)
    witnesses = sum(part.witnesses for part in parts.values() if part.answered == number)
    if witnesses < ENOUGH_WITNESSES:
        return StallState(question=question)
    return StallState(_name(plan, finding, suspects, hosts, number), question)


def _name(
    plan: Plan, finding: Finding, suspects: Sequence[Suspect], hosts: Mapping[int, str], number: int
) -> StallFinding:
    guilty = finding.ranks[:MAX_GUILTY]
    return StallFinding(
        key=plan.key,
        number=number,
        ranks=guilty,
        nodes=tuple(dict.fromkeys(hosts[rank] for rank in guilty)),
        reasons=finding.reasons,
        to_restart=ranks_to_restart(finding, suspects)[:MAX_GUILTY],
        alone=finding.others_go_on,
    )


def _log_line(found: StallFinding) -> str:
    named = f"{format_ranks(found.ranks)} on {' and '.join(found.nodes)} " if found.ranks else ""
    whose = "some workers of the round make no" if found.alone else "no worker of the round makes"
    return f"{whose} progress: {named}{render(found.reasons)}"


OBSERVER = StallObserver
