"""The parts of policies in the records of the core, for tests."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from dlrover_run.coordination.records.assignment import Assignment, NodeView
from dlrover_run.coordination.records.parts import Part
from dlrover_run.coordination.records.parts import with_part as parts_with
from dlrover_run.coordination.records.plan import Plan
from dlrover_run.coordination.records.report import NodePhase, NodeReport, ReportPart
from dlrover_run.coordination.records.round import Member
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds.ranks import rank_assignments
from dlrover_run.features.node_check.decision.model import NodeCheckAssignment, NodeCheckReport, NodeCheckState
from dlrover_run.features.node_check.rules import NodeCheckRules
from tf_ps_runner.cluster.model import Cluster
from tf_ps_runner.cluster.orders import NodeOrder
from tf_ps_runner.cluster.reports import NodeTasks
from tf_ps_runner.cluster.rules import ClusterRules

Record = TypeVar("Record", bound=msgspec.Struct)


def running_report(plan: Plan, member: Member, part: ReportPart | None = None, **changes: Any) -> NodeReport:
    """Return what a member of the round of the plan reports while its workers run, with the part of a policy."""
    report = NodeReport(
        node_id=member.node_id,
        incarnation=member.incarnation,
        host=member.host,
        address="",
        port=0,
        workers=member.workers,
        phase=NodePhase.RUNNING,
        ranks=rank_assignments(plan)[member.key],
        known_round=plan.key,
        epoch=plan.epoch,
        parts=() if part is None else (part,),
    )
    return msgspec.structs.replace(report, **changes)


def check_state(plan: Plan) -> NodeCheckState:
    """Return the state of the node check."""
    return NodeCheckState.get(plan.parts)


def check_report(report: NodeReport) -> NodeCheckReport:
    """Return the part of the node check in a report."""
    return NodeCheckReport.get(report.parts)


def check_part(assignment: Assignment | NodeView) -> NodeCheckAssignment:
    """Return the part of the node check in an assignment."""
    return NodeCheckAssignment.get(assignment.parts)


def check_rules(rules: JobRules) -> NodeCheckRules:
    """Return the rules of the node check."""
    return NodeCheckRules.get(rules.parts)


def cluster_of(plan: Plan) -> Cluster | None:
    """Return the cluster of a job with parameter servers."""
    return Cluster.find(plan.parts)


def tasks_of(report: NodeReport) -> NodeTasks | None:
    """Return the part of parameter servers in a report: the tasks of the node."""
    return NodeTasks.find(report.parts)


def order_of(assignment: Assignment | NodeView) -> NodeOrder | None:
    """Return the part of parameter servers in an assignment: the order of the node."""
    return NodeOrder.find(assignment.parts)


def cluster_rules(rules: JobRules) -> ClusterRules:
    """Return the rules of a job with parameter servers."""
    return ClusterRules.get(rules.parts)


def with_part(record: Record, kind: type[Part], **changes: Any) -> Record:
    """Return the record with these changes in the part of its policy."""
    part = kind.get(record.parts)  # type: ignore[attr-defined]
    return msgspec.structs.replace(record, parts=parts_with(record.parts, msgspec.structs.replace(part, **changes)))  # type: ignore[type-var]


def fold(kind: type[Part], fields: dict[str, Any], parts: tuple[Part, ...] = ()) -> dict[str, Any]:
    """Return the fields of a record, with the fields of a feature's part moved into `parts`, which are the former
    ones."""
    own = {name: fields[name] for name in kind.__struct_fields__ if name in fields}  # type: ignore[attr-defined]
    others = {name: value for name, value in fields.items() if name not in own}
    return {**others, "parts": parts_with(parts, msgspec.structs.replace(kind.get(parts), **own))} if own else others  # type: ignore[type-var]
