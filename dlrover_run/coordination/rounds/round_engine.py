"""The rounds of a job: one is gathered, formed, and runs until something ends it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from dlrover_run.coordination.decision import DeadlineReason, Decision, deadline_if, update_plan
from dlrover_run.coordination.engine import Accepted, Engine, phase_news
from dlrover_run.coordination.gate import Gate
from dlrover_run.coordination.membership import Nodes
from dlrover_run.coordination.records.assignment import AssignmentPart
from dlrover_run.coordination.records.plan import OVER, Plan, PlanPhase
from dlrover_run.coordination.records.report import NodeReport, ReportPart
from dlrover_run.coordination.records.requests import Action, OperatorRequest
from dlrover_run.coordination.records.round import NodeKey, RankAssignment
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.records.validation import problem_of_workers
from dlrover_run.coordination.rounds.gathering import gather
from dlrover_run.coordination.rounds.planned_changes import note_checkpoints
from dlrover_run.coordination.rounds.ranks import rank_assignments
from dlrover_run.coordination.rounds.recovery import connected_reports, recover_plan
from dlrover_run.coordination.rounds.requested_changes import change_size, drain
from dlrover_run.coordination.rounds.round_failures import continue_round, expire_restarts
from dlrover_run.coordination.rounds.waiting import is_full, wait_as_spare
from dlrover_run.words.text import counted

ROUNDS = "rounds"
"""The author of what is decided of rounds."""


class RoundEngine(Engine):
    """Gathers the nodes that the `gate` lets in, forms rounds of them, and ends these."""

    def __init__(self, rules: JobRules, gate: Gate) -> None:
        self.rules = rules
        self.gate = gate

    def decide(self, plan: Plan, nodes: Nodes, now: float) -> Decision:
        """What follows. A round that ends or begins is a step of its own, after which all are asked once more."""
        rules, gate = self.rules, self.gate
        charged = expire_restarts(rules, plan.restart_times, now)
        if charged != plan.restart_times:
            # Stored, because a successor's job time begins at the last plan that was stored.
            plan = update_plan(plan, now, restart_times=charged)
        plan = note_checkpoints(plan, nodes, now)
        decision = (gather if plan.phase is PlanPhase.GATHERING else continue_round)(rules, gate, plan, nodes, now)
        if decision.plan.phase in OVER or decision.again:
            return decision
        wait = decision.wait or partial(wait_as_spare, rules, gate, decision.plan, dict(nodes), None)
        forgiven_at = charged[0] + rules.restart_window if charged else None
        deadlines = (*decision.deadlines, *deadline_if(forgiven_at, DeadlineReason.BUDGET))
        return decision._replace(deadlines=deadlines, wait=wait)

    def ranks(self, plan: Plan) -> Mapping[NodeKey, RankAssignment]:
        return rank_assignments(plan)

    def orders(self, plan: Plan, ranks: Mapping[NodeKey, RankAssignment]) -> Mapping[NodeKey, AssignmentPart]:
        return self.gate.orders(plan, ranks)

    def request(self, base: JobRules, plan: Plan, nodes: Nodes, request: OperatorRequest, now: float) -> Accepted:
        if request.action is Action.SCALE:
            return Accepted(change_size(base, plan, nodes, request, now))
        # Of a round that runs they leave with the next planned change.
        later = {member.key for member in plan.members} if plan.phase is PlanPhase.TRAINING else frozenset()
        return Accepted(drain(plan, nodes, request, later, now))

    def problem(self, report: NodeReport, assigned: RankAssignment | None) -> str | None:
        return problem_of_workers(report, assigned)

    def is_full(self, base: JobRules, plan: Plan, offers: Sequence[ReportPart]) -> bool:
        return is_full(base, plan)

    def news(self, before: Plan, plan: Plan) -> str:
        if (plan.key, plan.phase) == (before.key, before.phase):
            return ""
        if plan.phase is PlanPhase.TRAINING:
            return f"round {plan.key.number} with {counted(len(plan.members), 'node')}: {plan.reason}"
        return phase_news(plan)

    def take_over(self, plan: Plan) -> Plan:
        return self.gate.take_over(plan)

    def continued(self, report: NodeReport) -> AssignmentPart | None:
        return None

    def recover(self, plan: Plan, nodes: Nodes, grace_over: bool, now: float) -> Plan | None:
        recovered = recover_plan(plan, connected_reports(nodes), grace_over)
        if recovered is None:
            return None
        return update_plan(recovered, recovered.clock, part=self.gate.recovered(recovered, nodes))
