"""Validation of what a node sends: its report against the plan, its rules and kind of job against the job's."""

from __future__ import annotations

from dataclasses import fields

from dlrover_run.coordination.bounds import MAX_WORKERS
from dlrover_run.coordination.model import Failure, NodeReport, Plan, RankAssignment
from dlrover_run.coordination.rules import CHECK_ALWAYS, CHECK_NEVER, CHECK_ONCE, MAX_NODES, JobRules
from dlrover_run.policies.parameter_servers.model import MAX_NODE_TASKS, MAX_TASKS, NodeTasks, Role
from dlrover_run.policies.parameter_servers.rules import ClusterRules

MAX_EPOCH = 2**62
"""A later epoch than any clock gives. A node may speak of a later one only where it is ours."""

MAX_ROUND = 2**32
"""More rounds than any job has. A node may speak of a later one only where the plan does."""

MAX_ID = 900_000
"""More processes than any role of a job has had. Those that follow still have a number that can be told."""

MAX_STEP = 2**53
"""More steps than any training has."""

MAX_CAPACITY = MAX_NODE_TASKS // 2
"""Rooms for tasks on one node, those for servers counted twice: while a version changes, its tasks and those of the
next one are told of."""

MAX_ADDRESS = 100
"""Characters of the address of a node with parameter servers: each node is told those of all tasks."""


def validate_report(report: NodeReport, plan: Plan, assigned: RankAssignment | None = None) -> str | None:
    """A sentence about what is wrong with a status; None for one that a coordinator with this plan may hear. `assigned`
    is the node's place in the plan's round."""
    keys = [report.known_round]
    tasks = [report.compute_result.key] if report.compute_result is not None else []
    tasks += [report.link_result.key] if report.link_result is not None else []
    if report.ranks is not None:
        keys.append(report.ranks.key)
        if not report.ranks.node_rank < report.ranks.nodes <= MAX_NODES:
            return "a status speaks of a seat that no round has"
    last_epoch, last_round = max(MAX_EPOCH, plan.epoch), max(MAX_ROUND, plan.key.number)
    if not all(
        0 <= epoch <= last_epoch
        for epoch in (report.epoch, *(key.epoch for key in keys), *(task.epoch for task in tasks))
    ):
        return "a status speaks of an epoch that no coordinator has"
    if any(key.number > last_round for key in keys):
        return "a status speaks of a round that no job has"
    if any(task.number > max(MAX_ROUND, plan.check_count) for task in tasks):
        return "a status speaks of a node check that no job has"
    if report.cluster is not None:
        return _implausible_hosting(report.cluster, last_round, report.address)
    if not 1 <= report.workers <= MAX_WORKERS:
        return f"a node has 1 to {MAX_WORKERS} workers, and this one says {report.workers}"
    return None if report.failure is None else _not_its_own(report, report.failure, assigned)


def _not_its_own(report: NodeReport, failure: Failure, assigned: RankAssignment | None) -> str | None:
    """Why the failure is not one of the node's own workers. The host and rank in it are shown on every node's console
    as the cause of a restart, so a node could otherwise have another one blamed."""
    if failure.host != report.host:
        return f"{report.host} reports a failure on another host, {failure.host}"
    seat = report.ranks
    if seat is not None and assigned is not None and seat.key == assigned.key:
        # What the coordinator assigned counts, not what the node says was assigned to it.
        seat = assigned
    if seat is None:
        return f"{report.host} reports a failure of rank {failure.rank} and has no ranks"
    if not seat.has_rank(failure.rank):
        own = f"rank {seat.first_rank}" if seat.workers == 1 else f"ranks {seat.first_rank} to {seat.last_rank}"
        return f"{report.host} reports a failure of rank {failure.rank}, which is not among its own: {own}"
    return None


def _implausible_hosting(hosting: NodeTasks, last_version: int, address: str) -> str | None:
    # The servers of two versions stand beside each other for a while.
    rooms = sum(room.slots * (2 if room.role is Role.PS else 1) for room in hosting.capacity)
    if rooms > MAX_CAPACITY:
        return (
            f"a node has at most {MAX_CAPACITY} rooms for tasks, those for servers counted twice; this one has {rooms}"
        )
    if len({room.role for room in hosting.capacity}) < len(hosting.capacity):
        return "a status speaks of the rooms for one role twice"
    if len({task.key for task in hosting.tasks}) < len(hosting.tasks):
        return "a status speaks of one task twice"
    if any(task.key.id > MAX_ID for task in hosting.tasks):
        return "a status speaks of a task that no job has"
    steps = [step for task in hosting.tasks for step in (task.step, task.saved, task.restored, task.reached)]
    if not all(-1 <= step <= MAX_STEP for step in steps):
        return "a status speaks of a step that no training has"
    if len(address) > MAX_ADDRESS:
        return f"the address of a node has at most {MAX_ADDRESS} characters here: give --local-addr a shorter one"
    account = hosting.hint
    if account is None:
        return None
    versions = [account.version, *(given.version for given in account.assigned)]
    ids = [number for spent in account.roles for number in (spent.ids, spent.failures, spent.memory)]
    ids += [given.key.id for given in account.assigned]
    ranks = [
        *(rank for state in account.roles for rank in state.succeeded),
        account.servers,
        account.tasks,
        *(given.rank for given in account.assigned),
    ]
    if max(versions) > last_version or max(ids, default=0) > MAX_ID or max(ranks) > MAX_TASKS:
        return "a status repeats a cluster that no job has"
    return None


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


def wrong_job_kind(job: JobRules, report: NodeReport) -> str | None:
    """Why a node of that kind cannot take part in the job, and what to do; None when it can."""
    if (job.cluster is None) == (report.cluster is None):
        return None
    if report.cluster is not None and report.cluster.is_client:
        return "the job was started with dlrover-run and has no parameter servers, so there is nothing to scale"
    here, there = ("dlrover-run", "tf-ps-run") if report.cluster is None else ("tf-ps-run", "dlrover-run")
    return f"the job was started with {there} and this node with {here}: use one of them, or another --rdzv-id"


def _shown(rules: JobRules, name: str) -> object:
    value = getattr(rules, name)
    return _WORDS.get(name, {}).get(value, value)
