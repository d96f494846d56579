"""The search for stalls as a policy: it changes no decision about rounds, and sends each node what it has found."""

from __future__ import annotations

from collections.abc import Mapping

from dlrover_run.coordination.decision import Decision, update_plan
from dlrover_run.coordination.membership import Members
from dlrover_run.coordination.model import NodeKey, Plan, PlanPhase, RankAssignment, rank_assignments
from dlrover_run.coordination.policy import Policy
from dlrover_run.coordination.reasons import render
from dlrover_run.coordination.text import format_ranks
from dlrover_run.policies.stall.model import (
    MAX_GUILTY,
    StallAssignment,
    StallFinding,
    StallNodeReport,
    StallState,
)
from dlrover_run.stall.guilt import NODES_AGE_MARGIN, find_stall, ranks_to_restart
from dlrover_run.stall.suspects import Suspect


class StallPolicy(Policy):
    """Finds out for which worker of which node all others of a round wait."""

    def refresh(self, plan: Plan, members: Members, now: float) -> Decision:
        found = find(plan, members)
        if found == StallState.get(plan.policy).finding:
            return Decision(plan)
        lines = () if found is None else (_log_line(found),)
        return Decision(update_plan(plan, now, policy=StallState(found)), log_lines=lines)

    def end_round(self, plan: Plan) -> Plan:
        if StallState.get(plan.policy).finding is None:
            return plan
        return update_plan(plan, plan.clock, policy=StallState())

    def tasks(self, plan: Plan, ranks: Mapping[NodeKey, RankAssignment]) -> Mapping[NodeKey, StallAssignment]:
        """The finding, for each node of the round."""
        found = StallState.get(plan.policy).finding
        return {} if found is None else dict.fromkeys(ranks, StallAssignment(found))


def find(plan: Plan, members: Members) -> StallFinding | None:
    """The stall of the round that runs. None as long as the workers of one node make progress, or a node is away: its
    workers may."""
    if plan.phase is not PlanPhase.TRAINING:
        return None
    parts: dict[NodeKey, StallNodeReport] = {}
    ended: set[NodeKey] = set()
    for member in plan.members:
        state = members.get(member.key)
        if member.done or (state is not None and state.succeeded_in(plan.key)):
            ended.add(member.key)
            continue
        if state is None or not state.connected or not state.report.in_round(plan.key):
            return None
        part = StallNodeReport.find(state.report.policy)
        if part is None:
            return None
        parts[member.key] = part
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
    trains = any(part.trains for part in parts.values())
    finding = find_stall(suspects, trains=trains, age_margin=NODES_AGE_MARGIN)
    if finding is None:
        return None
    guilty = finding.ranks[:MAX_GUILTY]
    return StallFinding(
        key=plan.key,
        number=sum(part.number for part in parts.values()),
        ranks=guilty,
        nodes=tuple(dict.fromkeys(hosts[rank] for rank in guilty)),
        reasons=finding.reasons,
        to_restart=ranks_to_restart(finding, suspects)[:MAX_GUILTY],
    )


def _log_line(found: StallFinding) -> str:
    named = f"{format_ranks(found.ranks)} on {' and '.join(found.nodes)} " if found.ranks else ""
    return f"no worker of the round makes progress: {named}{render(found.reasons)}"


POLICY = StallPolicy
