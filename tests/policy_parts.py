"""The parts that policies have in the records of the core, for tests."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from dlrover_run.coordination.model import Assignment, NodeReport, NodeView, Plan
from dlrover_run.coordination.policy_records import PolicyRecord
from dlrover_run.coordination.rules import JobRules
from dlrover_run.policies.health.model import HealthAssignment, HealthReport, HealthState
from dlrover_run.policies.health.rules import HealthRules
from dlrover_run.policies.parameter_servers.model import Cluster
from dlrover_run.policies.parameter_servers.orders import NodeOrder
from dlrover_run.policies.parameter_servers.reports import NodeTasks
from dlrover_run.policies.parameter_servers.rules import ClusterRules

Record = TypeVar("Record", bound=msgspec.Struct)


def check_state(plan: Plan) -> HealthState:
    """The state of the health check."""
    return HealthState.get(plan.policy)


def check_report(report: NodeReport) -> HealthReport:
    """What a node reports of its part in a health check."""
    return HealthReport.get(report.policy)


def check_part(assignment: Assignment | NodeView) -> HealthAssignment:
    """What a node is assigned by the health check."""
    return HealthAssignment.get(assignment.policy)


def check_rules(rules: JobRules) -> HealthRules:
    """The rules of the health check."""
    return HealthRules.get(rules.policy)


def cluster_of(plan: Plan) -> Cluster | None:
    """The cluster of a job with parameter servers."""
    return Cluster.find(plan.policy)


def tasks_of(report: NodeReport) -> NodeTasks | None:
    """What a node reports of its tasks."""
    return NodeTasks.find(report.policy)


def order_of(assignment: Assignment | NodeView) -> NodeOrder | None:
    """A node's order."""
    return NodeOrder.find(assignment.policy)


def cluster_rules(rules: JobRules) -> ClusterRules:
    """The rules of a job with parameter servers."""
    return ClusterRules.get(rules.policy)


def with_part(record: Record, kind: type[PolicyRecord], **changes: Any) -> Record:
    """The record with those changes of its policy's part."""
    part = kind.get(record.policy)  # type: ignore[attr-defined]
    return msgspec.structs.replace(record, policy=msgspec.structs.replace(part, **changes))  # type: ignore[type-var]


def fold(kind: type[PolicyRecord], fields: dict[str, Any], part: PolicyRecord | None = None) -> dict[str, Any]:
    """The fields of a record, with those of a policy's part folded into `policy`; `part` is the part before."""
    own = {name: fields[name] for name in kind.__struct_fields__ if name in fields}  # type: ignore[attr-defined]
    others = {name: value for name, value in fields.items() if name not in own}
    return {**others, "policy": msgspec.structs.replace(kind.get(part), **own)} if own else others  # type: ignore[type-var]
