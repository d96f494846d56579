"""How a coordinator without a journal recovers the cluster: each node receives a part of it and reports it back.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import Member, NodeKey, RoundKey
from dlrover_run.coordination.rounds.recovery import latest_round
from dlrover_run.words.reasons import Code
from tf_ps_runner.cluster.choice import ReplicaChoice, recovered
from tf_ps_runner.cluster.model import (
    AssignedTask,
    Cluster,
    MemoryLimit,
    PlannedTask,
    RecoveryHint,
    Role,
    RoleState,
    Stage,
    TaskKey,
    TaskStage,
    TaskStatus,
)
from tf_ps_runner.cluster.reports import NodeTasks
from tf_ps_runner.cluster.rules import ROLES


def recovery_hint(cluster: Cluster) -> RecoveryHint:
    """What each node receives to report back."""
    return RecoveryHint(
        version=cluster.version,
        servers=sum(task.role is Role.PS for task in cluster.tasks),
        tasks=len(cluster.tasks),
        desired=cluster.desired,
        choice=None if cluster.choice is None else cluster.choice.lasting,
        roles=cluster.roles,
    )


class _Repeated(NamedTuple):
    """What one node reports back, and the state of each of its tasks."""

    node: NodeReport
    hint: RecoveryHint
    tasks: dict[TaskKey, TaskStatus]


def recover_cluster(empty_plan: Plan, statuses: Sequence[NodeReport], grace_over: bool, now: float) -> Plan | None:
    """The plan of the latest version that a node knows of; None while nodes that could report more are still awaited.

    With `grace_over`, nodes that have not reported by now are not awaited any more. Servers, and a chief, that no node
    has reported are assigned to nodes that do not exist, so that they count as lost. Servers of a next version are
    started anew.
    """
    known = [latest_round(status) for status in statuses]
    latest = max(known, default=RoundKey())
    nodes = [
        _Repeated(status, part.hint, {one.key: one for one in part.tasks})
        for status in statuses
        if (part := NodeTasks.find(status.parts)) is not None and part.hint is not None
    ]
    if not nodes:
        # The job has been running without any cluster, or its nodes have lost what they had to report back.
        return msgspec.structs.replace(empty_plan, key=latest) if grace_over and latest != RoundKey() else None
    # An id is never given out twice, so later hints of one job count more ids.
    hint = max((one.hint for one in nodes), key=lambda hint: (hint.version, sum(state.ids for state in hint.roles)))
    tasks = _tasks(nodes, hint.version)
    if not grace_over and len(tasks) < hint.tasks:
        return None
    states = _role_states(nodes)
    if tasks:
        tasks += _unknown(hint, tasks, states)
    cluster = Cluster(
        version=hint.version,
        since=now,
        desired=hint.desired,
        choice=_choice(nodes),
        tasks=tuple(sorted(tasks, key=lambda task: task.key)),
        roles=tuple(states[role] for role in Role if role in states),
        memory_limits=tuple(MemoryLimit(task.role, task.rank, task.memory_mib) for task in tasks if task.memory_mib),
    )
    members = {NodeKey(task.node_id, task.incarnation): task.host for task in tasks}
    # A node may know rounds of an earlier job of this name. The number of a round is that of its version.
    key = max((one for one in known if one.number == hint.version), default=RoundKey(latest.epoch, hint.version))
    return msgspec.structs.replace(
        empty_plan,
        key=key,
        phase=PlanPhase.TRAINING if tasks else PlanPhase.GATHERING,
        members=tuple(Member(*key, host, 0) for key, host in members.items()),
        reasons=(Code.RECOVERED(),),
        parts=with_part(empty_plan.parts, _with_milestones(cluster, nodes, now)),
    )


def _choice(nodes: Iterable[_Repeated]) -> ReplicaChoice | None:
    """What the job had chosen, by the node that knows the latest; None without one."""
    kept = [one.hint.choice for one in nodes if one.hint.choice is not None]
    return recovered(max(kept, key=lambda one: (one.workers.epoch, one.workers.changed_at))) if kept else None


def _tasks(nodes: Iterable[_Repeated], version: int) -> list[PlannedTask]:
    """The tasks of that version; of each rank the last one that is known."""
    found: dict[tuple[Role, int], PlannedTask] = {}
    for one in nodes:
        for assigned in one.hint.assigned:
            place = (assigned.key.role, assigned.rank)
            is_current = assigned.version == version or ROLES[assigned.key.role].outlives_versions
            if is_current and (place not in found or found[place].key < assigned.key):
                found[place] = _task(one.node, assigned, one.tasks.get(assigned.key))
    return list(found.values())


def _task(node: NodeReport, assigned: AssignedTask, status: TaskStatus | None) -> PlannedTask:
    queue = status if assigned.port else None
    return PlannedTask(
        key=assigned.key,
        rank=assigned.rank,
        version=assigned.version,
        node_id=node.node_id,
        incarnation=node.incarnation,
        host=node.host,
        address=node.address if assigned.port else "",
        port=assigned.port,
        queue_port=queue.queue_port if queue is not None else 0,
        queue_key=queue.queue_key if queue is not None else "",
        memory_mib=assigned.memory_mib,
    )


def _role_states(nodes: Iterable[_Repeated]) -> dict[Role, RoleState]:
    """What has happened in each role: the most that any node knows of."""
    found: dict[Role, RoleState] = {}
    for one in (state for node in nodes for state in node.hint.roles):
        known = found.get(one.role, one)
        found[one.role] = RoleState(
            role=one.role,
            ids=max(known.ids, one.ids),
            failures=max(known.failures, one.failures),
            memory_restarts=max(known.memory_restarts, one.memory_restarts),
            succeeded=tuple(sorted({*known.succeeded, *one.succeeded})),
            given_up=known.given_up or one.given_up,
        )
    return found


def _unknown(hint: RecoveryHint, tasks: Iterable[PlannedTask], states: dict[Role, RoleState]) -> list[PlannedTask]:
    """A chief and servers in the places of those that no node hosts."""
    known = {(task.role, task.rank) for task in tasks}
    wanted = [(Role.CHIEF, 0), *((Role.PS, rank) for rank in range(hint.servers))]
    made_up = []
    for role, rank in (place for place in wanted if place not in known):
        before = states.get(role, RoleState(role))
        states[role] = msgspec.structs.replace(before, ids=before.ids + 1)
        made_up.append(
            PlannedTask(
                key=TaskKey(role, before.ids),
                rank=rank,
                version=hint.version,
                node_id=f"unknown-{role.value}-{rank}",
                incarnation="unknown",
                host=f"the node that had {role.value} {rank}",
            )
        )
    return made_up


def _with_milestones(cluster: Cluster, nodes: Iterable[_Repeated], now: float) -> Cluster:
    statuses = {key: status for one in nodes for key, status in one.tasks.items()}
    needed = [task for task in cluster.tasks if task.role in (Role.CHIEF, Role.PS)]
    if not cluster.tasks or not all(task.port for task in needed):
        return cluster
    cluster = msgspec.structs.replace(cluster, ports_held_at=now)
    chief = next((statuses[task.key] for task in needed if task.role is Role.CHIEF and task.key in statuses), None)
    if chief is None or (chief.stage is not TaskStage.READY and chief.restored < 0):
        return cluster
    return msgspec.structs.replace(
        cluster,
        stage=Stage.TRAINING,
        servers_ready_at=now,
        opened_at=now,
        step=chief.restored,
        saved=chief.restored,
        proven_servers=sum(task.role is Role.PS for task in cluster.tasks),
    )
