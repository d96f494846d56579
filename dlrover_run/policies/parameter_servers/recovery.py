"""The plan of a running job with parameter servers, rebuilt from what its nodes repeat, for a coordinator that has no
journal of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from dlrover_run.coordination.adoption import latest_round
from dlrover_run.coordination.records import Member, NodeKey, NodeStatus, Plan, PlanPhase, RoundKey
from dlrover_run.policies.parameter_servers.model import (
    AssignedTask,
    Cluster,
    MemoryLimit,
    NodeOrder,
    NodeTasks,
    RecoveryHint,
    Role,
    RoleUsage,
    Stage,
    Task,
    TaskEnd,
    TaskKey,
    TaskStage,
    TaskStatus,
)

MAX_ENDS_BYTES = 48 * 1024
"""Bytes of all ends in one status that are told whole. When a server dies each process of the node may leave a
traceback, and some of them say as much as all."""

SHORT_END = 100
"""Characters of what is told of the other ends."""


def recovery_hint(cluster: Cluster) -> RecoveryHint:
    """What each node is told to repeat."""
    return RecoveryHint(
        version=cluster.version,
        servers=sum(task.role is Role.PS for task in cluster.tasks),
        tasks=len(cluster.tasks),
        desired=cluster.desired,
        usage=cluster.usage,
        succeeded_workers=cluster.succeeded_workers,
        evaluator_succeeded=cluster.evaluator_succeeded,
        evaluator_failed=cluster.evaluator_failed,
    )


def with_answer(order: NodeOrder, cluster: Cluster, node_id: str) -> NodeOrder:
    """The order with what was decided on the last wish of that node."""
    for wish in cluster.scale_answers:
        if wish.node_id == node_id:
            return msgspec.structs.replace(
                order, scale_answered=wish.number, scale_refused=wish.refused, scale_answer=wish.answer
            )
    return order


def order_to_continue(hosting: NodeTasks) -> NodeOrder | None:
    """The order of a node until a coordinator without a journal knows the cluster: to go on, if it has tasks."""
    account = hosting.hint
    return NodeOrder(version=account.version, keep=True) if account is not None and account.assigned else None


def parted(order: NodeOrder) -> tuple[NodeOrder, NodeOrder]:
    """What all nodes with an order are told alike, which may be long, and what is this node's own."""
    alike = msgspec.structs.replace(order, tasks=(), scale_answered=0, scale_refused=False, scale_answer="")
    return alike, _with_own(NodeOrder(version=order.version), order)


def joined(alike: NodeOrder, own: NodeOrder) -> NodeOrder:
    """The order that was parted."""
    return _with_own(alike, own)


def _with_own(order: NodeOrder, own: NodeOrder) -> NodeOrder:
    return msgspec.structs.replace(
        order,
        tasks=own.tasks,
        scale_answered=own.scale_answered,
        scale_refused=own.scale_refused,
        scale_answer=own.scale_answer,
    )


class Memory(NamedTuple):
    """What a node remembers of the orders that it was given."""

    hint: RecoveryHint | None = None

    def follow(self, order: NodeOrder | None) -> Memory:
        """The memory after another order, but none that says to go on. One that asks for nothing takes no account away:
        the job may go on, and counts its restarts from there."""
        if order is None:
            return Memory(self.hint and msgspec.structs.replace(self.hint, assigned=()))
        account = order.hint or self.hint
        given = tuple(AssignedTask(task.key, task.rank, task.version, task.port, task.memory) for task in order.tasks)
        return Memory(account and msgspec.structs.replace(account, assigned=given))

    def add_to(self, hosting: NodeTasks) -> NodeTasks:
        """What a node says of itself, as it is told over a network."""
        return msgspec.structs.replace(hosting, hint=self.hint, tasks=_with_short_ends(hosting.tasks))


def _with_short_ends(tasks: tuple[TaskStatus, ...]) -> tuple[TaskStatus, ...]:
    """The same, with few words about the ends for which one message has no room; the shortest are told whole."""
    sizes = {task.key: len(msgspec.json.encode(task.end)) for task in tasks if task.end is not None}
    room, whole = MAX_ENDS_BYTES, set()
    for key in sorted(sizes, key=lambda key: (sizes[key], key)):
        room -= sizes[key]
        if room >= 0:
            whole.add(key)
    if len(whole) == len(sizes):
        return tasks

    def shortened(task: TaskStatus) -> TaskStatus:
        if task.end is None or task.key in whole:
            return task
        return msgspec.structs.replace(task, end=TaskEnd(task.end.cause, task.end.what[:SHORT_END]))

    return tuple(map(shortened, tasks))


Heard = list[tuple[NodeStatus, RecoveryHint, dict[TaskKey, TaskStatus]]]
"""Each node that repeats something, and what it says of each of its tasks."""


def recover_cluster(fresh: Plan, statuses: Sequence[NodeStatus], waited: bool, now: float) -> Plan | None:
    """The plan of the latest version that a node knows of; None while some who could say more are still to be heard.

    `waited` says that those who were not heard by now will not be waited for. Servers, and a chief, that nobody has
    spoken of are given to nodes that nobody is, so that they count as lost. Servers of a next version are begun anew.
    """
    latest = max((latest_round(status) for status in statuses), default=RoundKey())
    heard: Heard = [
        (status, status.cluster.hint, {one.key: one for one in status.cluster.tasks})
        for status in statuses
        if status.cluster is not None and status.cluster.hint is not None
    ]
    if not heard:
        # The job has been running without any cluster, or its nodes have forgotten it.
        return msgspec.structs.replace(fresh, key=latest) if waited and latest != RoundKey() else None
    account = max((account for _, account, _ in heard), key=_age)
    tasks = _tasks(heard, account.version)
    if not waited and len(tasks) < account.tasks:
        return None
    spent = _spent(heard)
    if tasks:
        tasks += _unknown(account, tasks, spent)
    cluster = Cluster(
        version=account.version,
        since=now,
        desired=account.desired,
        tasks=tuple(sorted(tasks, key=lambda task: task.key)),
        succeeded_workers=tuple(sorted({rank for _, one, _ in heard for rank in one.succeeded_workers})),
        evaluator_succeeded=any(one.evaluator_succeeded for _, one, _ in heard),
        evaluator_failed=any(one.evaluator_failed for _, one, _ in heard),
        usage=tuple(spent[role] for role in Role if role in spent),
        memory_limits=tuple(MemoryLimit(task.role, task.rank, task.memory) for task in tasks if task.memory),
    )
    members = {NodeKey(task.node_id, task.incarnation): task.host for task in tasks}
    return msgspec.structs.replace(
        fresh,
        key=latest,
        phase=PlanPhase.TRAINING if tasks else PlanPhase.GATHERING,
        members=tuple(Member(*key, host, 0) for key, host in members.items()),
        reason="the job was running when its coordinator began",
        cluster=_with_milestones(cluster, heard, now),
    )


def _age(account: RecoveryHint) -> tuple[int, int]:
    """Later accounts of one job come after earlier ones: an id is never given back."""
    return account.version, sum(spent.ids for spent in account.usage)


def _tasks(heard: Heard, version: int) -> list[Task]:
    """The tasks of that version, of each rank the last one that is known."""
    found: dict[tuple[Role, int], Task] = {}
    for status, account, told in heard:
        for given in account.assigned:
            place = (given.key.role, given.rank)
            # An evaluator goes on from version to version.
            current = given.version == version or given.key.role is Role.EVALUATOR
            if current and (place not in found or found[place].key < given.key):
                found[place] = _task(status, given, told.get(given.key))
    return list(found.values())


def _task(status: NodeStatus, given: AssignedTask, told: TaskStatus | None) -> Task:
    return Task(
        key=given.key,
        rank=given.rank,
        version=given.version,
        node_id=status.node_id,
        incarnation=status.incarnation,
        host=status.host,
        address=status.address if given.port else "",
        port=given.port,
        queue_port=told.queue_port if given.port and told is not None else 0,
        queue_key=told.queue_key if given.port and told is not None else "",
        memory=given.memory,
    )


def _spent(heard: Heard) -> dict[Role, RoleUsage]:
    """What each role has cost: the most that anybody knows of."""
    found: dict[Role, RoleUsage] = {}
    for one in (spent for _, account, _ in heard for spent in account.usage):
        known = found.get(one.role, one)
        most = (max(known.ids, one.ids), max(known.failures, one.failures), max(known.memory, one.memory))
        found[one.role] = RoleUsage(one.role, *most)
    return found


def _unknown(account: RecoveryHint, tasks: Iterable[Task], spent: dict[Role, RoleUsage]) -> list[Task]:
    """A chief and servers in the places of those that nobody hosts."""
    had = {(task.role, task.rank) for task in tasks}
    wanted = [(Role.CHIEF, 0), *((Role.PS, rank) for rank in range(account.servers))]
    made_up = []
    for role, rank in (place for place in wanted if place not in had):
        before = spent.get(role, RoleUsage(role))
        spent[role] = msgspec.structs.replace(before, ids=before.ids + 1)
        made_up.append(
            Task(
                key=TaskKey(role, before.ids),
                rank=rank,
                version=account.version,
                node_id=f"unknown-{role.value}-{rank}",
                incarnation="unknown",
                host=f"the node that had {role.value} {rank}",
            )
        )
    return made_up


def _with_milestones(cluster: Cluster, heard: Heard, now: float) -> Cluster:
    """How far this version has come."""
    told = {key: one for _, _, tasks in heard for key, one in tasks.items()}
    if not cluster.tasks or not all(task.port for task in cluster.tasks if task.role in (Role.CHIEF, Role.PS)):
        return cluster
    cluster = msgspec.structs.replace(cluster, ports_held_at=now)
    chief = next((told[task.key] for task in cluster.tasks if task.role is Role.CHIEF and task.key in told), None)
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
