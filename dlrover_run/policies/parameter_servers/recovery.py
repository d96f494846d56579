"""How a coordinator without a journal recovers the cluster: each node receives a part of it and reports it back.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from dlrover_run.coordination.model import Member, NodeKey, NodeReport, Plan, PlanPhase, RoundKey
from dlrover_run.coordination.reasons import sentence
from dlrover_run.coordination.recovery import latest_round
from dlrover_run.policies.parameter_servers.model import (
    AssignedTask,
    Cluster,
    MemoryLimit,
    NodeOrder,
    NodeTasks,
    RecoveryHint,
    Role,
    RoleState,
    Stage,
    Task,
    TaskEnd,
    TaskKey,
    TaskStage,
    TaskStatus,
)
from dlrover_run.policies.parameter_servers.rules import ROLES
from dlrover_run.policies.parameter_servers.text import Code

MAX_ENDS_BYTES = 48 * 1024
"""Bytes of the ends in one status that are sent in full. When a server dies each process of the node may leave a
traceback, and a few of them explain as much as all."""

SHORT_END = 100
"""Characters that are sent of the other ends."""


def recovery_hint(cluster: Cluster) -> RecoveryHint:
    """What each node receives to report back."""
    return RecoveryHint(
        version=cluster.version,
        servers=sum(task.role is Role.PS for task in cluster.tasks),
        tasks=len(cluster.tasks),
        desired=cluster.desired,
        roles=cluster.roles,
    )


def order_to_continue(tasks: NodeTasks) -> NodeOrder | None:
    """The order of a node until a coordinator without a journal knows the cluster: to continue, if it has tasks."""
    hint = tasks.hint
    return NodeOrder(version=hint.version, keep=True) if hint is not None and hint.assigned else None


class OrderMemory(NamedTuple):
    """What a node remembers of the orders that it received."""

    hint: RecoveryHint | None = None

    def follow(self, order: NodeOrder | None) -> OrderMemory:
        """The memory after another order, except one to continue. An order without a hint does not erase the one
        before: the job may continue, and count its restarts from there."""
        if order is None:
            return OrderMemory(self.hint and msgspec.structs.replace(self.hint, assigned=()))
        hint = order.hint or self.hint
        assigned = tuple(AssignedTask(one.key, one.rank, one.version, one.port, one.memory) for one in order.tasks)
        return OrderMemory(hint and msgspec.structs.replace(hint, assigned=assigned))

    def add_to(self, tasks: NodeTasks) -> NodeTasks:
        """What a node reports of its tasks over a network."""
        return msgspec.structs.replace(tasks, hint=self.hint, tasks=_with_short_ends(tasks.tasks))


def _with_short_ends(tasks: tuple[TaskStatus, ...]) -> tuple[TaskStatus, ...]:
    """The same tasks, with short texts for the ends that do not fit into one message; the shortest are sent in full."""
    sizes = {task.key: len(msgspec.json.encode(task.end)) for task in tasks if task.end is not None}
    left, too_long = MAX_ENDS_BYTES, set()
    for key in sorted(sizes, key=lambda key: (sizes[key], key)):
        left -= sizes[key]
        if left < 0:
            too_long.add(key)

    def shortened(task: TaskStatus) -> TaskStatus:
        if task.end is None or task.key not in too_long:
            return task
        return msgspec.structs.replace(task, end=TaskEnd(task.end.cause, task.end.what[:SHORT_END]))

    return tuple(map(shortened, tasks)) if too_long else tasks


class _Repeated(NamedTuple):
    """What one node reports back, and the state of each of its tasks."""

    node: NodeReport
    hint: RecoveryHint
    tasks: dict[TaskKey, TaskStatus]


def recover_cluster(fresh: Plan, statuses: Sequence[NodeReport], waited: bool, now: float) -> Plan | None:
    """The plan of the latest version that a node knows of; None while nodes that could report more are still awaited.

    `waited` says that nodes which have not reported by now are not awaited any more. Servers, and a chief, that no node
    has reported are assigned to nodes that do not exist, so that they count as lost. Servers of a next version are
    started anew.
    """
    latest = max((latest_round(status) for status in statuses), default=RoundKey())
    nodes = [
        _Repeated(status, status.cluster.hint, {one.key: one for one in status.cluster.tasks})
        for status in statuses
        if status.cluster is not None and status.cluster.hint is not None
    ]
    if not nodes:
        # The job has been running without any cluster, or its nodes have lost what they had to report back.
        return msgspec.structs.replace(fresh, key=latest) if waited and latest != RoundKey() else None
    # An id is never given out twice, so later hints of one job count more ids.
    hint = max((one.hint for one in nodes), key=lambda hint: (hint.version, sum(state.ids for state in hint.roles)))
    tasks = _tasks(nodes, hint.version)
    if not waited and len(tasks) < hint.tasks:
        return None
    states = _role_states(nodes)
    if tasks:
        tasks += _unknown(hint, tasks, states)
    cluster = Cluster(
        version=hint.version,
        since=now,
        desired=hint.desired,
        tasks=tuple(sorted(tasks, key=lambda task: task.key)),
        roles=tuple(states[role] for role in Role if role in states),
        memory_limits=tuple(MemoryLimit(task.role, task.rank, task.memory) for task in tasks if task.memory),
    )
    members = {NodeKey(task.node_id, task.incarnation): task.host for task in tasks}
    return msgspec.structs.replace(
        fresh,
        key=latest,
        phase=PlanPhase.TRAINING if tasks else PlanPhase.GATHERING,
        members=tuple(Member(*key, host, 0) for key, host in members.items()),
        reasons=sentence(Code.RECOVERED()),
        cluster=_with_milestones(cluster, nodes, now),
    )


def _tasks(nodes: Iterable[_Repeated], version: int) -> list[Task]:
    """The tasks of that version; of each rank the last one that is known."""
    found: dict[tuple[Role, int], Task] = {}
    for one in nodes:
        for assigned in one.hint.assigned:
            place = (assigned.key.role, assigned.rank)
            is_current = assigned.version == version or ROLES[assigned.key.role].outlives_versions
            if is_current and (place not in found or found[place].key < assigned.key):
                found[place] = _task(one.node, assigned, one.tasks.get(assigned.key))
    return list(found.values())


def _task(node: NodeReport, assigned: AssignedTask, status: TaskStatus | None) -> Task:
    queue = status if assigned.port else None
    return Task(
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
        memory=assigned.memory,
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
            memory=max(known.memory, one.memory),
            succeeded=tuple(sorted({*known.succeeded, *one.succeeded})),
            given_up=known.given_up or one.given_up,
        )
    return found


def _unknown(hint: RecoveryHint, tasks: Iterable[Task], states: dict[Role, RoleState]) -> list[Task]:
    """A chief and servers in the places of those that no node hosts."""
    known = {(task.role, task.rank) for task in tasks}
    wanted = [(Role.CHIEF, 0), *((Role.PS, rank) for rank in range(hint.servers))]
    made_up = []
    for role, rank in (place for place in wanted if place not in known):
        before = states.get(role, RoleState(role))
        states[role] = msgspec.structs.replace(before, ids=before.ids + 1)
        made_up.append(
            Task(
                key=TaskKey(role, before.ids),
                rank=rank,
                version=hint.version,
                node_id=f"unknown-{role.value}-{rank}",
                incarnation="unknown",
                host=Code.UNKNOWN_NODE(role=role.value, rank=rank),
            )
        )
    return made_up


def _with_milestones(cluster: Cluster, nodes: Iterable[_Repeated], now: float) -> Cluster:
    """How far this version has come."""
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
