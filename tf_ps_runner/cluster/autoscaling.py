"""The steps of a job that chooses its own numbers of workers and servers: what the nodes report becomes a view of the
job, and what is decided becomes numbers that the other steps follow."""

from __future__ import annotations

from msgspec.structs import replace

from dlrover_run.coordination.records.plan import Plan
from dlrover_run.features.autoscale.decide import decide, find_record
from dlrover_run.features.autoscale.measure import Estimate, estimate
from dlrover_run.features.autoscale.model import (
    MAX_CRASHES,
    AutoscaleState,
    FailureAtSize,
    RoundClock,
    Sizes,
    SizeView,
    StepsReport,
)
from dlrover_run.features.autoscale.observer import BLOCKS_PER_REPORT, REPORTS_PER_BLOCK
from dlrover_run.features.autoscale.rules import AutoscaleRules
from dlrover_run.words.reasons import Reasons
from tf_ps_runner.cluster import text
from tf_ps_runner.cluster.budgets import may_try_servers
from tf_ps_runner.cluster.choice import CHIEFS, ReplicaChoice, ServersChoice, search_again
from tf_ps_runner.cluster.model import Cluster, EndCause, Role, Stage
from tf_ps_runner.cluster.placement import all_slots, desired_ranks, replica_bounds
from tf_ps_runner.cluster.reports import Pace
from tf_ps_runner.cluster.server_load import ServersView, awaits_measurement, decide_servers
from tf_ps_runner.cluster.size_text import of_workers
from tf_ps_runner.cluster.text import ClusterCode
from tf_ps_runner.cluster.view import ClusterView, host_of, tasks_of, without

CHARGED = frozenset({EndCause.FAILURE, EndCause.MEMORY, EndCause.SILENT, EndCause.REPEATED})
"""Ends of a worker that may be due to the number of workers."""


def choose(view: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """The plan with the numbers of workers and servers that are wanted now, if anything has changed."""
    before = cluster.choice
    if before is None:
        return None
    return _with_choice(view, plan, cluster, before, _decided(view, plan, cluster, before, None))


def excuse(view: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """The plan without workers that have failed while their number was only tried, which costs no restart."""
    before = cluster.choice
    if before is None or not _is_trial(cluster, before):
        return None
    losses = view.losses_of(cluster, tasks_of(cluster, Role.WORKER))
    failed = [loss for loss in losses if not loss.free and loss.end.cause in CHARGED]
    if not failed:
        return None
    if view.pending_reconnect(plan) is not None:
        # The loss of a server may be why they ended. That is known in a moment.
        return plan
    last = max(loss.task.key.id for loss in failed)
    failure = FailureAtSize(last + 1, before.workers.target)
    after = _decided(view, plan, cluster, before, failure)
    rest = without(cluster, *(loss.task for loss in failed))
    reasons = (*text.lost_tasks(failed), ClusterCode.EXCUSED(number=before.workers.target - CHIEFS))
    return _with_choice(view, plan, rest, before, after, reasons)


def report_interval(rules: AutoscaleRules, cluster: Cluster) -> float:
    """Seconds between two reports of the steps and of the load, 0 for none."""
    choice = cluster.choice
    if choice is None:
        return 0.0
    record = find_record(choice.workers, choice.workers.measurement.size)
    is_known = record is not None and record.blocks > 0 and choice.servers.baseline is None
    return rules.block * BLOCKS_PER_REPORT if is_known else rules.block / REPORTS_PER_BLOCK


def allowed_sizes(view: ClusterView) -> Sizes:
    """How many tasks may train."""
    limits = view.limits
    return view.autoscale.allowed(CHIEFS + limits.min_workers, CHIEFS + limits.max_workers, 1)


def _decided(
    view: ClusterView, plan: Plan, cluster: Cluster, before: ReplicaChoice, failure: FailureAtSize | None
) -> ReplicaChoice:
    rules, now = view.autoscale, view.now
    servers_now = len(tasks_of(cluster, Role.PS))
    choice = before
    is_open = cluster.stage in (Stage.TRAINING, Stage.CHANGING)
    if is_open and choice.measured_with != servers_now:
        if choice.measured_with:
            choice = replace(choice, workers=search_again(choice.workers))
        choice = replace(choice, measured_with=servers_now)
    workers = replace(choice.workers, clock=_clock(view, plan, cluster, choice.workers))
    is_steady = cluster.stage is Stage.TRAINING and view.pending_reconnect(plan) is None
    job = _job_view(view, plan, cluster, workers, failure)
    job = replace(job, busy=job.busy or not is_steady)
    servers = _servers_view(view, cluster, workers, job.size, is_steady and not job.busy)
    chosen = choice.servers
    if cluster.desired.ps is None:
        chosen = decide_servers(rules, chosen, servers, now)
        changes = servers.servers < chosen.target <= servers.room and servers.may_try
        if failure is None and (changes or awaits_measurement(rules, chosen, servers, now)):
            # One change at a time.
            job = replace(job, busy=True)
    else:
        chosen = replace(chosen, busy_since=None, baseline=None, lacking=0)
    if cluster.desired.workers is not None:
        # Their throughput is measured for the servers, and nothing is decided.
        job = replace(job, busy=True)
    workers = decide(rules, allowed_sizes(view), workers, job, now)
    after = replace(choice, workers=workers, servers=chosen)
    if _lasting(after) != _lasting(before):
        after = replace(after, workers=replace(workers, changed_at=now, epoch=plan.epoch))
    return after


def _lasting(choice: ReplicaChoice) -> ReplicaChoice:
    return replace(choice, workers=choice.workers.lasting, servers=choice.servers.lasting)


def _with_choice(
    view: ClusterView,
    plan: Plan,
    cluster: Cluster,
    before: ReplicaChoice,
    after: ReplicaChoice,
    reasons: Reasons = (),
) -> Plan | None:
    """The plan with that choice, and why, where a reader should know; None if nothing has changed."""
    if after == before and not reasons:
        return None
    if _is_news(before.servers, after.servers):
        reasons = (*reasons, *after.servers.reasons)
    elif _news(after.workers) != _news(before.workers):
        reasons = (*reasons, *of_workers(after.workers.reasons))
    return view.update(plan, cluster, reasons or None, choice=after)


def _news(state: AutoscaleState) -> tuple[object, ...]:
    return state.target, state.condition


def _is_news(before: ServersChoice, after: ServersChoice) -> bool:
    """Whether a server is added, or was compared, or is wanted without room."""
    was_compared = before.baseline is not None and after.baseline is None
    return after.target > before.target > 0 or was_compared or after.lacking > before.lacking


def _is_trial(cluster: Cluster, choice: ReplicaChoice) -> bool:
    """Whether the number of workers is only tried: a few failures of it cost no restart."""
    state = choice.workers
    record = find_record(state, state.target)
    if cluster.desired.workers is not None or not any(one.blocks for one in state.table):
        return False
    return bool(state.target) and (record is None or (not record.blocks and record.crashes < MAX_CRASHES))


def _job_view(
    view: ClusterView, plan: Plan, cluster: Cluster, state: AutoscaleState, failure: FailureAtSize | None
) -> SizeView:
    """The input of a decision about the workers. A *round* is a time in which the same tasks train."""
    trainers = [cluster.role_state(role) for role in (Role.CHIEF, Role.WORKER)]
    return SizeView(
        round=sum(one.ids for one in trainers),
        size=_size(view, plan, cluster),
        present=CHIEFS + all_slots(view, Role.WORKER),
        progress=_progress(view, plan, cluster, state),
        failure=failure,
        busy=any(one.succeeded for one in trainers),
    )


def _size(view: ClusterView, plan: Plan, cluster: Cluster) -> int:
    """How many tasks train; 0 while that is about to change."""
    chiefs, workers = tasks_of(cluster, Role.CHIEF), tasks_of(cluster, Role.WORKER)
    if cluster.stage not in (Stage.TRAINING, Stage.CHANGING) or not chiefs:
        return 0
    if not all(view.is_ready(task) for task in (*chiefs, *workers)):
        return 0
    if any(key is None or key.role in (Role.CHIEF, Role.WORKER) for _, key in view.leftover_tasks(plan, cluster)):
        return 0
    wanted = len(desired_ranks(view.limits, cluster, Role.WORKER))
    may_change = len(workers) > wanted or len(workers) < min(wanted, all_slots(view, Role.WORKER))
    return 0 if may_change else CHIEFS + len(workers)


def _chief_pace(view: ClusterView, cluster: Cluster) -> Pace | None:
    """What the node of the chief reports of the steps of this version."""
    for chief in tasks_of(cluster, Role.CHIEF):
        part = view.node_tasks.get(host_of(chief))
        if part is not None and part.pace is not None and part.pace.version == cluster.version:
            return part.pace
    return None


def _clock(view: ClusterView, plan: Plan, cluster: Cluster, state: AutoscaleState) -> RoundClock:
    """When the steps of the version began, by the first report of them, which has just been received."""
    pace = _chief_pace(view, cluster)
    if pace is None or state.clock.key == plan.key:
        return state.clock
    return RoundClock(plan.key, round(view.now - pace.age - pace.seconds, 3))


def _progress(view: ClusterView, plan: Plan, cluster: Cluster, state: AutoscaleState) -> StepsReport | None:
    pace = _chief_pace(view, cluster)
    if pace is None or state.clock.key != plan.key:
        return None
    return StepsReport(pace.step, max(0.0, round(state.clock.began + pace.seconds, 3)))


def _servers_view(view: ClusterView, cluster: Cluster, state: AutoscaleState, size: int, steady: bool) -> ServersView:
    servers = tasks_of(cluster, Role.PS)
    parts = [view.node_tasks.get(node) for node in {host_of(task) for task in servers}]
    loads = [part.load for part in parts if part is not None and part.load is not None]
    loads = [load for load in loads if load.version == cluster.version]
    return ServersView(
        version=cluster.version,
        servers=len(servers),
        most=replica_bounds(view.limits, cluster, Role.PS)[1],
        room=all_slots(view, Role.PS),
        size=size,
        steady=steady,
        may_try=may_try_servers(view.limits, cluster),
        processor=max((load.processor for load in loads), default=None),
        memory=max((load.memory for load in loads), default=None),
        rate=_rate(state, size),
    )


def _rate(state: AutoscaleState, size: int) -> Estimate | None:
    """The throughput of the present size, as far as it is known."""
    record = find_record(state, size)
    if record is not None and record.blocks:
        return Estimate(record.rate, record.error, record.blocks)
    return estimate(state.measurement.blocks) if size and state.measurement.size == size else None
