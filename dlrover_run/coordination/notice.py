"""What a person is told whose node has other rules than the job that it joins, or is of another kind than that."""

from __future__ import annotations

from dataclasses import fields

from dlrover_run.coordination.records import NodeReport
from dlrover_run.coordination.rules import CHECK_ALWAYS, CHECK_NEVER, CHECK_ONCE, JobRules
from dlrover_run.policies.parameter_servers.rules import ClusterRules

_FLAGS = {
    "min_nodes": "--nnodes (least)",
    "max_nodes": "--nnodes (most)",
    "node_unit": "--node-unit",
    "spares": "--spares",
    "max_restarts": "--max-restarts",
    "check": "--network-check",
    "straggler_threshold": "--straggler-threshold",
    "exclude_stragglers": "--exclude-straggler",
    "measure_links": "--comm-perf-test",
}
_CLUSTER_FLAGS = {
    "min_ps": "--ps (least)",
    "max_ps": "--ps (most)",
    "min_workers": "--workers (least)",
    "max_workers": "--workers (most)",
    "evaluator": "--evaluator",
    "max_restarts": "--max-restarts",
    "worker_memory": "--worker-memory (MiB)",
    "ps_memory": "--ps-memory (MiB)",
    "max_memory": "--max-memory (MiB)",
}
_WORDS: dict[str, dict[int, str]] = {
    "check": {CHECK_NEVER: "off", CHECK_ONCE: "once", CHECK_ALWAYS: "always"},
    "exclude_stragglers": {0: "off", 1: "on"},
    "measure_links": {0: "off", 1: "on"},
}
"""What a person wrote for a number, where that was a word."""


def config_mismatch(job: JobRules, node: JobRules) -> str:
    """One sentence that names what differs; empty when nothing does."""
    # Those that nobody can set follow from others.
    names = [field.name for field in fields(JobRules) if field.name not in ("store", "detection_delay", "cluster")]
    names = [name for name in names if getattr(job, name) != getattr(node, name)]
    said = [f"{_FLAGS.get(name, name)} is {_shown(job, name)}, not {_shown(node, name)}" for name in names]
    if job.cluster is not None and node.cluster is not None:
        said += _of_cluster(job.cluster, node.cluster)
    return f"the rules of the job's first node hold: {'; '.join(said)}"[:2000] if said else ""


def _of_cluster(job: ClusterRules, node: ClusterRules) -> list[str]:
    names = [field.name for field in fields(ClusterRules)]
    pairs = [(name, getattr(job, name), getattr(node, name)) for name in names]
    return [f"{_CLUSTER_FLAGS.get(name, name)} is {one:g}, not {other:g}" for name, one, other in pairs if one != other]


def wrong_job_kind(job: JobRules, status: NodeReport) -> str | None:
    """Why a node of that kind cannot take part in the job, and what to do; None when it can."""
    if (job.cluster is None) == (status.cluster is None):
        return None
    if status.cluster is not None and status.cluster.is_client:
        return "the job was started with dlrover-run and has no parameter servers, so there is nothing to scale"
    here, there = ("dlrover-run", "tf-ps-run") if status.cluster is None else ("tf-ps-run", "dlrover-run")
    return f"the job was started with {there} and this node with {here}: use one of them, or another --rdzv-id"


def _shown(rules: JobRules, name: str) -> object:
    value = getattr(rules, name)
    return _WORDS.get(name, {}).get(value, value)
