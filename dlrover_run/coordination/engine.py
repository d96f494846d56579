"""What decides what the nodes of a job run: rounds of workers (`round_engine`), or a feature in place of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol

from dlrover_run.coordination.decision import Decision
from dlrover_run.coordination.membership import Nodes
from dlrover_run.coordination.records.assignment import AssignmentPart
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodeReport, ReportPart
from dlrover_run.coordination.records.requests import OperatorRequest
from dlrover_run.coordination.records.round import NodeKey, RankAssignment
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.words.reasons import Reasons


class Accepted(NamedTuple):
    """A request that is carried out: the plan after it, and what the job does now, for the operator."""

    plan: Plan
    answer: Reasons = ()


class Engine(Protocol):
    """Pure, as an observer is. Its parts of the plan are its own."""

    has_successors: ClassVar[bool] = True
    """Whether nodes of the job may start the next master."""

    def decide(self, plan: Plan, nodes: Nodes, now: float) -> Decision:
        """What follows in a job that is not over, after its observers have looked."""
        ...

    def ranks(self, plan: Plan) -> Mapping[NodeKey, RankAssignment]:
        """The ranks that nodes have."""
        ...

    def orders(self, plan: Plan, ranks: Mapping[NodeKey, RankAssignment]) -> Mapping[NodeKey, AssignmentPart]:
        """What is assigned to nodes beside their ranks."""
        ...

    def request(self, base: JobRules, plan: Plan, nodes: Nodes, request: OperatorRequest, now: float) -> Accepted:
        """What follows from an operator's request to drain a node or to change the size of a job that was started with
        the rules `base`. Raises RequestFailed."""
        ...

    def problem(self, report: NodeReport, assigned: RankAssignment | None) -> str | None:
        """A sentence about what is wrong with a report of what the node runs, else None. `assigned` are its ranks."""
        ...

    def is_full(self, base: JobRules, plan: Plan, offers: Sequence[ReportPart]) -> bool:
        """Whether the job trains with as many nodes, or tasks, as one that was started with the rules `base` may have,
        so that a node which comes with these `offers` would wait as a spare."""
        ...

    def news(self, before: Plan, plan: Plan) -> str:
        """What has changed, for the log of a coordinator; empty for what no user needs to read."""
        ...

    def take_over(self, plan: Plan) -> Plan:
        """A predecessor's plan, for its successor."""
        ...

    def continued(self, report: NodeReport) -> AssignmentPart | None:
        """The part of the assignment with which a node continues until the plan is rebuilt."""
        ...

    def recover(self, plan: Plan, nodes: Nodes, grace_over: bool, now: float) -> Plan | None:
        """The plan of a running job, rebuilt from the reports of the nodes that are connected; None while nodes are
        awaited that could report more. With `grace_over` no further ones are."""
        ...


def phase_news(plan: Plan) -> str:
    """The phase of a plan that has just begun, if it is not that of training, and why."""
    phase = "waiting for nodes" if plan.phase is PlanPhase.GATHERING else plan.phase.value
    return f"{phase}: {plan.reason}"
