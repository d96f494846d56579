"""The status of a job for an operator: what the coordinator knows of the job and of each of its nodes. Pure.

It is a record of its own and not the plan, so that the plan can change without a change of what programs read
(`status --json`, `/v1/status`).
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from dlrover_run.coordination.activities import Received
from dlrover_run.coordination.membership import KnownNode, Nodes
from dlrover_run.coordination.node_views import EMPTY_VIEW
from dlrover_run.coordination.records.activity import MemoryUse, PhaseTimes
from dlrover_run.coordination.records.assignment import NodeView, Waiting
from dlrover_run.coordination.records.parts import PROGRAM
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodePhase
from dlrover_run.coordination.records.resource_use import NodeUse
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.records.size_choice import SizeChoice
from dlrover_run.coordination.rounds.ranks import rank_assignments
from dlrover_run.job_status.hang_text import HangingNode, hang_headline, stall_reason
from dlrover_run.job_status.progress import NodeProgress, job_times, node_progress
from dlrover_run.words.reasons import Reasons

SCHEMA = 1
"""The version of the meaning of the fields. New fields keep it."""

MAX_SHOWN = 1000
"""Nodes in a status. Of more than that those are left out first of which there is least to say."""


class JobState(enum.StrEnum):
    """What the job is doing. WAITING: it has no round, because nodes are missing or are being checked."""

    WAITING = "waiting"
    TRAINING = "training"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class NodeCondition(enum.StrEnum):
    """What one node is doing.

    STARTING: it has a place in the round, and has not reported that its workers run. WAITING: there is no round. SPARE:
    it has no place in the round that runs. DRAINING: it was asked to leave, and its workers have their grace.
    DISCONNECTED: it is declared lost unless it connects again.
    """

    STARTING = "starting"
    TRAINING = "training"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    WAITING = "waiting"
    CHECKING = "checking"
    SPARE = "spare"
    DRAINING = "draining"
    DISCONNECTED = "disconnected"
    EXCLUDED = "excluded"


class StragglerStatus(msgspec.Struct, frozen=True):
    """A worker for which the others wait in each step. `cause` says what it does meanwhile: it is `computing`, has no
    `processor`, waits for `data` or a `disk`, sleeps (`time`), or has a slow `network`."""

    rank: int
    cause: str


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One node. `node` is its rank, `first_rank` the first global rank of its `workers`; both are None for a node
    without a place. `seconds` is for how long it is in its state, None where that is not known. `tasks` names what it
    runs, in a job without ranks. `reason` says why it is in this state, empty where there is nothing to say.
    `progress` is what its tasks have done, None if that is not known, and `memory` what their checkpoints take in
    memory, None if none was held. `stragglers` are those of its workers. `use` is what its tasks take of its
    processors, memory and devices, None if that is not known."""

    node: int | None
    host: str
    node_id: str
    state: NodeCondition
    seconds: float | None
    workers: int
    first_rank: int | None = None
    tasks: tuple[str, ...] = ()
    reason: str = ""
    progress: NodeProgress | None = None
    memory: MemoryUse | None = None
    stragglers: tuple[StragglerStatus, ...] = ()
    use: NodeUse | None = None


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One job. `round` is the last round, or the version of the cluster in a job without ranks.

    `seconds` is for how long it is in its state, `age` how long it has had a coordinator; both are None
    where they are not known. `restarts_left` is None where nothing limits them. `reason` renders `reasons`, which say
    why the plan is as it is; `waiting` is what nodes without a place wait for, at most `waiting_seconds` from now.
    `hang` says which workers make no progress, and for which of them the others wait; empty if all go on.
    `desired_nodes` is the size, N or MIN:MAX, that `desired_by` has asked for, empty where that is the whole range.
    `change_waits` says that a planned change waits for the next checkpoint, `change_seconds` at most from now.
    `size_choice` is what a feature that chooses the number of nodes wants, None in a job without one.
    `node_counts` counts all nodes by their state, also the `nodes_omitted`. `answer` says what the job does because of
    the request for which the status was sent, empty without one or where the other fields say it. `times` are the
    seconds of all workers so far in each phase of the ledger, and `time_places` how many workers are in each now."""

    schema: int = SCHEMA
    job: str
    program: str = PROGRAM
    state: JobState
    seconds: float | None
    age: float | None
    epoch: int
    round: int
    min_nodes: int
    max_nodes: int
    spares_wanted: int = 0
    round_nodes: int = 0
    workers: int = 0
    restarts: int = 0
    max_restarts: int | None = 0
    restarts_left: int | None = None
    restart_window: float = 0.0
    reason: str = ""
    reasons: Reasons = ()
    waiting: str = ""
    hang: str = ""
    waiting_seconds: float | None = None
    desired_nodes: str = ""
    desired_by: str = ""
    change_waits: bool = False
    change_seconds: float | None = None
    size_choice: SizeChoice | None = None
    node_counts: Mapping[str, int]
    nodes: tuple[NodeStatus, ...]
    nodes_omitted: int = 0
    answer: str = ""
    times: Mapping[str, float] = {}
    time_places: Mapping[str, int] = {}


@dataclass(frozen=True)
class JobView:
    """What a status is made of: the state of a coordinator at job time `now`. `aged` is False where the times in it are
    those of a reader that has just read the records of the job. `past_times` are the seconds of nodes that are gone, by
    phase."""

    name: str
    rules: JobRules
    plan: Plan
    nodes: Nodes
    views: Mapping[NodeKey, NodeView]
    waiting: Waiting | None
    now: float
    aged: bool = True
    activities: Mapping[NodeKey, Received] = field(default_factory=dict)
    past_times: Mapping[str, float] = field(default_factory=dict)


def job_status(view: JobView) -> JobStatus:
    plan, rules = view.plan, view.rules
    has_rounds = not rules.engine
    nodes = list(_nodes(view))
    hanging = _hanging(nodes)
    if hanging:
        culprit_known = any(node.progress.hangs for node in hanging)
        nodes = [_with_stall(node, culprit_known) for node in nodes]
    shown = _shown(nodes)
    used = len(plan.restart_times) if rules.restart_window else plan.restart_count
    desired, change = plan.desired, plan.change
    latest = None if change is None or not view.aged else change.since + rules.scale_wait
    times, places = _times(view)
    waiting = view.waiting if plan.phase is not PlanPhase.TRAINING or not has_rounds else None
    return JobStatus(
        job=view.name,
        program=rules.program,
        state=STATES[plan.phase],
        seconds=_ago(view, plan.since),
        age=view.now if view.aged else None,
        epoch=plan.epoch,
        round=plan.key.number,
        min_nodes=rules.min_nodes,
        max_nodes=rules.max_nodes,
        spares_wanted=rules.spares,
        round_nodes=len(plan.members) if plan.phase is PlanPhase.TRAINING else 0,
        workers=sum(member.workers for member in plan.members)
        if plan.phase is PlanPhase.TRAINING and has_rounds
        else 0,
        restarts=plan.restart_count,
        max_restarts=rules.max_restarts if has_rounds else None,
        restarts_left=max(0, rules.max_restarts - used) if has_rounds else None,
        restart_window=rules.restart_window,
        reason=plan.reason,
        reasons=plan.reasons,
        waiting="" if waiting is None else waiting.text,
        hang=hang_headline(hanging, "worker" if has_rounds else "task"),
        waiting_seconds=None if waiting is None else waiting.seconds,
        desired_nodes="" if desired is None else size_text(desired.min_nodes, desired.max_nodes, rules.min_nodes),
        desired_by="" if desired is None else desired.by,
        change_waits=change is not None,
        change_seconds=None if latest is None else round(max(0.0, latest - view.now), 3),
        size_choice=_size_choice(plan),
        node_counts=dict(sorted(Counter(each.state.value for each in nodes).items())),
        nodes=shown,
        nodes_omitted=len(nodes) - len(shown),
        times=times,
        time_places=places,
    )


def _times(view: JobView) -> tuple[dict[str, float], dict[str, int]]:
    found = [(PhaseTimes(dict(view.past_times), {}), 0.0)]
    for key, known in view.activities.items():
        times, node = known.activity.times, view.nodes.get(key)
        if times is None:
            continue
        if view.aged and node is not None and node.connected:
            found.append((times, max(0.0, view.now - known.at)))
        else:
            # What its workers do since then is not known.
            found.append((PhaseTimes(times.seconds, {}), 0.0))
    return job_times(found)


def _size_choice(plan: Plan) -> SizeChoice | None:
    choice = plan.size_choice
    if choice is None or plan.desired is None or not plan.desired.fixed:
        return choice
    return msgspec.structs.replace(choice, paused=True)


def with_readings(status: JobStatus, memory: Mapping[str, MemoryUse], use: Mapping[str, NodeUse]) -> JobStatus:
    """The status with what the agents of this machine read now, by their node ids: what checkpoints take in memory, and
    what the tasks use."""
    nodes = (
        msgspec.structs.replace(each, memory=memory.get(each.node_id, each.memory), use=use.get(each.node_id, each.use))
        for each in status.nodes
    )
    return msgspec.structs.replace(status, nodes=tuple(nodes))


def size_text(least: int, most: int, job_min_nodes: int) -> str:
    """The size of a round as an operator asks for it: N keeps the least number of nodes of the job."""
    return str(most) if least == job_min_nodes else f"{least}:{most}"


STATES = {
    PlanPhase.GATHERING: JobState.WAITING,
    PlanPhase.TRAINING: JobState.TRAINING,
    PlanPhase.FINISHED: JobState.SUCCEEDED,
    PlanPhase.FAILED: JobState.FAILED,
}


def _nodes(view: JobView) -> Iterable[NodeStatus]:
    """All nodes: those of the round in the order of their ranks, then the others in the order in which they joined."""
    ranks = rank_assignments(view.plan)
    others = [key for key, p in view.nodes.items() if key not in ranks and p.report.phase is not NodePhase.LEFT]
    others.sort(key=lambda key: (view.nodes[key].joined_at, key))
    hosts = {member.key: member for member in view.plan.members}
    for key in (*ranks, *others):
        p, place = view.nodes.get(key), ranks.get(key)
        own = view.views.get(key, EMPTY_VIEW)
        state, since, reason = _condition(view, key, p, own)
        progress = _progress(view, key) if state in RUNS else None
        yield NodeStatus(
            node=None if place is None else place.node_rank,
            host=hosts[key].host if p is None else p.report.host,
            node_id=key.node_id,
            state=state,
            seconds=None if since is None else _ago(view, since),
            workers=hosts[key].workers if p is None else p.report.workers,
            first_rank=None if place is None else place.first_rank,
            tasks=tuple(name for part in own.parts for name in part.task_names),
            reason="; ".join(filter(None, (_ended_reason(view, key), _watch_reason(view, key), reason))),
            progress=progress,
            memory=known.activity.memory if (known := view.activities.get(key)) is not None else None,
            use=known.activity.use if known is not None and state in RUNS else None,
            stragglers=tuple(StragglerStatus(*found) for part in own.parts for found in part.slow_ranks),
        )


RUNS = frozenset({NodeCondition.TRAINING, NodeCondition.DRAINING, NodeCondition.DISCONNECTED})
"""The states of nodes whose tasks may make progress."""


def _progress(view: JobView, key: NodeKey) -> NodeProgress | None:
    known = view.activities.get(key)
    if known is None:
        return None
    age = max(0.0, view.now - known.at) if view.aged else None
    return node_progress(known.activity.tasks, age, known.activity.awaited)


def _hanging(nodes: Sequence[NodeStatus]) -> list[HangingNode]:
    return [
        HangingNode(node.host if node.node is None else f"node {node.node}", node.progress)
        for node in nodes
        if node.progress is not None and node.progress.stalled
    ]


def _with_stall(node: NodeStatus, culprit_known: bool) -> NodeStatus:
    stall = stall_reason(node.progress, culprit_known=culprit_known)
    return msgspec.structs.replace(node, reason="; ".join(filter(None, (stall, node.reason)))) if stall else node


MAX_ENDED_NAMED = 3
"""Tasks that have ended whose names are shown."""


def _ended_reason(view: JobView, key: NodeKey) -> str:
    known = view.activities.get(key)
    ended = () if known is None else known.activity.ended
    if not ended:
        return ""
    more = len(ended) - MAX_ENDED_NAMED
    names = ", ".join(ended[:MAX_ENDED_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"{names} {'has' if len(ended) == 1 else 'have'} ended, the others run"


def _watch_reason(view: JobView, key: NodeKey) -> str:
    known = view.activities.get(key)
    problem = "" if known is None else known.activity.watch_problem
    return f"hangs are not found: {problem}" if problem else ""


def _condition(
    view: JobView, key: NodeKey, p: KnownNode | None, own: NodeView
) -> tuple[NodeCondition, float | None, str]:
    """What a node is doing, since when, and why."""
    plan = view.plan
    if p is None:
        done = any(member.done for member in plan.members if member.key == key)
        return (NodeCondition.SUCCEEDED if done else NodeCondition.DISCONNECTED), None, ""
    if p.succeeded_in(plan.key) and plan.phase in (PlanPhase.TRAINING, PlanPhase.FINISHED):
        return NodeCondition.SUCCEEDED, p.changed_at, ""
    if not p.connected:
        left = max(0.0, (p.lost_at or 0.0) - view.now)
        reason = f"lost in {left:.1f} s unless it connects again" if view.aged and left else ""
        # Minus infinity: a coordinator that has just taken over waits for it.
        since = p.disconnected_at
        return NodeCondition.DISCONNECTED, since if since is not None and math.isfinite(since) else None, reason
    report = p.report
    if p.is_draining:
        return NodeCondition.DRAINING, p.changed_at, f"asked to leave by {report.ended_by}" if report.ended_by else ""
    if report.phase is NodePhase.FAILED and report.failure is not None and report.in_round(plan.key):
        return NodeCondition.FAILED, p.changed_at, f"rank {report.failure.rank} {report.failure.exit_text}"
    note = "; ".join(part.note for part in own.parts if part.note)
    if own.dismissal is not None:
        return NodeCondition.EXCLUDED, p.changed_at, note
    if own.needs_idle_node:
        return NodeCondition.CHECKING, p.changed_at, note
    if plan.phase is not PlanPhase.TRAINING:
        return NodeCondition.WAITING, p.changed_at, note
    if view.views.get(key, EMPTY_VIEW).waits:
        return NodeCondition.SPARE, p.joined_at, note
    started = report.phase is NodePhase.RUNNING and (report.in_round(plan.key) or bool(own.parts))
    runs_tasks = any(part.has_tasks for part in own.parts)
    return (NodeCondition.TRAINING if started or runs_tasks else NodeCondition.STARTING), p.changed_at, note


def _ago(view: JobView, since: float) -> float | None:
    return round(max(0.0, view.now - since), 3) if view.aged else None


def _shown(nodes: list[NodeStatus]) -> tuple[NodeStatus, ...]:
    if len(nodes) <= MAX_SHOWN:
        return _with_tasks_used(nodes)
    dull = (NodeCondition.TRAINING, NodeCondition.SUCCEEDED, NodeCondition.SPARE)
    by_interest = sorted(range(len(nodes)), key=lambda place: nodes[place].state in dull and not nodes[place].reason)
    return _with_tasks_used([nodes[place] for place in sorted(by_interest[:MAX_SHOWN])])


MAX_TASKS_USED = 2048
"""Tasks in a status of which each is shown with what it uses; of the nodes after them only the sums are."""


def _with_tasks_used(nodes: Sequence[NodeStatus]) -> tuple[NodeStatus, ...]:
    shown, tasks = [], 0
    for node in nodes:
        if node.use is not None:
            tasks += len(node.use.tasks)
            if tasks > MAX_TASKS_USED:
                node = msgspec.structs.replace(node, use=msgspec.structs.replace(node.use, tasks=()))
        shown.append(node)
    return tuple(shown)
