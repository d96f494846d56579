"""Validation of what a node sends: its report against the plan, its rules and kind of job against the job's."""

from __future__ import annotations

import msgspec

from dlrover_run.coordination.records.bounds import MAX_WORKERS
from dlrover_run.coordination.records.parts import PROGRAM
from dlrover_run.coordination.records.plan import Plan
from dlrover_run.coordination.records.report import NodeReport, ReportPart
from dlrover_run.coordination.records.round import Failure, RankAssignment
from dlrover_run.coordination.records.rules import MAX_NODES, JobRules, RulesPart

MAX_EPOCH = 2**62
"""A later epoch than any clock gives. A node may report a later one only if it is this coordinator's."""

MAX_ROUND = 2**32
"""More rounds than any job has. A node may report a later one only if the plan has it."""


def validate_report(report: NodeReport, plan: Plan) -> str | None:
    """A sentence about what is wrong with a report, whatever the node runs; None for one that a coordinator with this
    plan may take."""
    keys = [report.known_round]
    if report.ranks is not None:
        keys.append(report.ranks.key)
        if not report.ranks.node_rank < report.ranks.nodes <= MAX_NODES:
            return "a report has a node rank that no round has"
    if not all(is_known_epoch(epoch, plan) for epoch in (report.epoch, *(key.epoch for key in keys))):
        return UNKNOWN_EPOCH
    if any(key.number > last_round(plan) for key in keys):
        return "a report names a round that no job has"
    return next((found for part in report.parts if (found := part.problem(report, plan)) is not None), None)


def problem_of_workers(report: NodeReport, assigned: RankAssignment | None) -> str | None:
    """A sentence about what is wrong with the workers that a node reports, and with their failure. `assigned` are the
    node's ranks in the plan's round."""
    if not 1 <= report.workers <= MAX_WORKERS:
        return f"a node has 1 to {MAX_WORKERS} workers, and this one reports {report.workers}"
    return None if report.failure is None else _not_its_own(report, report.failure, assigned)


UNKNOWN_EPOCH = "a report names an epoch that no coordinator has"
"""The problem of a report with an epoch that is not `is_known_epoch`."""


def is_known_epoch(epoch: int, plan: Plan) -> bool:
    """Whether a coordinator can have that epoch."""
    return 0 <= epoch <= max(MAX_EPOCH, plan.epoch)


def last_round(plan: Plan) -> int:
    """The highest number of a round that a node may report."""
    return max(MAX_ROUND, plan.key.number)


def _not_its_own(report: NodeReport, failure: Failure, assigned: RankAssignment | None) -> str | None:
    """Why the failure is not one of the node's own workers. The host and rank in it are shown on every node's console
    as the cause of a restart, so a node could otherwise blame another one."""
    if failure.host != report.host:
        return f"{report.host} reports a failure on another host, {failure.host}"
    ranks = report.ranks
    if ranks is not None and assigned is not None and ranks.key == assigned.key:
        # What the coordinator assigned counts, not what the node reports.
        ranks = assigned
    if ranks is None:
        return f"{report.host} reports a failure of rank {failure.rank} and has no ranks"
    if not ranks.has_rank(failure.rank):
        own = f"rank {ranks.first_rank}" if ranks.workers == 1 else f"ranks {ranks.first_rank} to {ranks.last_rank}"
        return f"{report.host} reports a failure of rank {failure.rank}, which is not among its own: {own}"
    return None


_FLAGS = {
    "min_nodes": "--nnodes (least)",
    "max_nodes": "--nnodes (most)",
    "node_unit": "--node-unit",
    "spares": "--spares",
    "max_restarts": "--max-restarts",
}


def config_mismatch(job: JobRules, node: JobRules) -> str:
    """One sentence that names what differs; empty when nothing does."""
    # No flag sets those that are left out: they follow from others.
    names = [name for name in JobRules.__struct_fields__ if name not in ("store", "detection_delay", "parts")]
    names = [name for name in names if getattr(job, name) != getattr(node, name)]
    differences = [f"{_FLAGS.get(name, name)} is {getattr(job, name)}, not {getattr(node, name)}" for name in names]
    differences += _part_mismatch(job, node)
    return f"the rules of the job's first node hold: {'; '.join(differences)}"[:2000] if differences else ""


def _part_mismatch(job: JobRules, node: JobRules) -> list[str]:
    parts = (*job.parts, *node.parts)
    if job.engine != node.engine:
        # A node of another kind of job is refused; see `wrong_job_kind`.
        return []
    differences: list[str] = []
    for kind in dict.fromkeys(type(part) for part in parts):
        one, other = kind.get(job.parts), kind.get(node.parts)
        assert isinstance(one, msgspec.Struct), "each part is a struct"
        compared = [name for name in one.__struct_fields__ if name not in kind.per_node]
        names = [name for name in compared if getattr(one, name) != getattr(other, name)]
        differences += [
            f"{kind.flags.get(name, name)} is {_shown(one, name)}, not {_shown(other, name)}" for name in names
        ]
    return differences


def wrong_job_kind(job: JobRules, report: NodeReport) -> str | None:
    """Why a node of that kind cannot take part in the job, and what to do; None when it can."""
    own = next((part for part in report.parts if part.program != PROGRAM), ReportPart())
    return None if own.program == job.program else own.mismatch(job.program)


def _shown(rules: RulesPart, name: str) -> str:
    value = getattr(rules, name)
    return rules.value_names.get(name, {}).get(value, f"{value:g}")
