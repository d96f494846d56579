"""What an agent answers an operator about its own node while its coordinator cannot be reached. Pure.

The client of a master calls it in place of the master. Of the other nodes only their number is known, from the last
round.
"""

from __future__ import annotations

import msgspec

from dlrover_run.coordination.activities import Received
from dlrover_run.coordination.membership import KnownNode
from dlrover_run.coordination.node_views import continued_assignment
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds.recovery import latest_round, recover_plan
from dlrover_run.features.registry import job_of
from dlrover_run.job_status.questions import StackQuery
from dlrover_run.job_status.stacks import (
    JobStacks,
    NodeStacks,
    StackRequest,
    nodes_to_ask,
)
from dlrover_run.job_status.status import JobStatus, JobView, job_status
from dlrover_run.words.reasons import sentence


def own_status(name: str, rules: JobRules, report: NodeReport, absence: str) -> JobStatus:
    """The status of the job as this node knows it; `absence` is the clause that says why no coordinator answers."""
    plan, nodes = _known(report)
    plan = msgspec.structs.replace(plan, reasons=sentence(absence))
    view = continued_assignment(job_of(rules), plan, report, None)
    activities = {} if report.activity is None else {report.key: Received(report.activity, 0.0)}
    views = {report.key: view}
    status = job_status(JobView(name, rules, plan, nodes, views, None, 0.0, aged=False, activities=activities))
    shown = (
        msgspec.structs.replace(node, reason="; ".join(filter(None, (node.reason, absence))))
        if node.node_id == report.node_id
        else node
        for node in status.nodes
    )
    return msgspec.structs.replace(status, nodes=tuple(shown))


def own_stacks(name: str, report: NodeReport, query: StackQuery, found: NodeStacks) -> JobStacks:
    """The stacks of this node; the other nodes did not answer. Raises RequestFailed if the query concerns none."""
    plan, nodes = _known(report)
    request = StackRequest(0, nodes_to_ask(plan, nodes, query), [report.key])
    request.take(report.key, found)
    return request.result(name, plan)


def _known(report: NodeReport) -> tuple[Plan, dict[NodeKey, KnownNode]]:
    plan = recover_plan(Plan(epoch=report.epoch), [report], grace_over=True)
    if plan is None:
        plan = Plan(epoch=report.epoch, key=latest_round(report), phase=PlanPhase.GATHERING)
    return plan, {report.key: KnownNode(report, 0.0, 0.0)}
