"""The plan of a running job with parameter servers, rebuilt from what its nodes repeat, for a coordinator that has no
journal of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from dlrover_run.coordination.adoption import latest_round
from dlrover_run.coordination.cluster.records import (
    Account,
    Cluster,
    Given,
    Limit,
    Role,
    Spent,
    Stage,
    Task,
    TaskKey,
    TaskStage,
    TaskStatus,
)
from dlrover_run.coordination.records import Member, NodeKey, NodeStatus, Plan, PlanPhase, RoundKey

Heard = list[tuple[NodeStatus, Account, dict[TaskKey, TaskStatus]]]
"""Each node that repeats something, and what it says of each of its tasks."""


def adopt_cluster(fresh: Plan, statuses: Sequence[NodeStatus], waited: bool, now: float) -> Plan | None:
    """The plan of the latest version that a node knows of; None while some who could say more are still to be heard.

    `waited` says that those who were not heard by now will not be waited for. Servers, and a chief, that nobody has
    spoken of are given to nodes that nobody is, so that they count as lost. Servers of a next version are begun anew.
    """
    latest = max((latest_round(status) for status in statuses), default=RoundKey())
    heard: Heard = [
        (status, status.cluster.account, {one.key: one for one in status.cluster.tasks})
        for status in statuses
        if status.cluster is not None and status.cluster.account is not None
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
        targets=account.targets,
        tasks=tuple(sorted(tasks, key=lambda task: task.key)),
        done=tuple(sorted({rank for _, one, _ in heard for rank in one.done})),
        evaluated=any(one.evaluated for _, one, _ in heard),
        unevaluated=any(one.unevaluated for _, one, _ in heard),
        spent=tuple(spent[role] for role in Role if role in spent),
        limits=tuple(Limit(task.role, task.rank, task.memory) for task in tasks if task.memory),
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


def _age(account: Account) -> tuple[int, int]:
    """Later accounts of one job come after earlier ones: an id is never given back."""
    return account.version, sum(spent.ids for spent in account.spent)


def _tasks(heard: Heard, version: int) -> list[Task]:
    """The tasks of that version, of each rank the last one that is known."""
    found: dict[tuple[Role, int], Task] = {}
    for status, account, told in heard:
        for given in account.given:
            place = (given.key.role, given.rank)
            # An evaluator goes on from version to version.
            current = given.version == version or given.key.role is Role.EVALUATOR
            if current and (place not in found or found[place].key < given.key):
                found[place] = _task(status, given, told.get(given.key))
    return list(found.values())


def _task(status: NodeStatus, given: Given, told: TaskStatus | None) -> Task:
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


def _spent(heard: Heard) -> dict[Role, Spent]:
    """What each role has cost: the most that anybody knows of."""
    found: dict[Role, Spent] = {}
    for one in (spent for _, account, _ in heard for spent in account.spent):
        known = found.get(one.role, one)
        most = (max(known.ids, one.ids), max(known.failures, one.failures), max(known.memory, one.memory))
        found[one.role] = Spent(one.role, *most)
    return found


def _unknown(account: Account, tasks: Iterable[Task], spent: dict[Role, Spent]) -> list[Task]:
    """A chief and servers in the places of those that nobody hosts."""
    had = {(task.role, task.rank) for task in tasks}
    wanted = [(Role.CHIEF, 0), *((Role.PS, rank) for rank in range(account.servers))]
    made_up = []
    for role, rank in (place for place in wanted if place not in had):
        before = spent.get(role, Spent(role))
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
    cluster = msgspec.structs.replace(cluster, held_at=now)
    chief = next((told[task.key] for task in cluster.tasks if task.role is Role.CHIEF and task.key in told), None)
    if chief is None or (chief.stage is not TaskStage.READY and chief.restored < 0):
        return cluster
    return msgspec.structs.replace(
        cluster,
        stage=Stage.TRAINING,
        served_at=now,
        opened_at=now,
        step=chief.restored,
        saved=chief.restored,
        proven_ps=sum(task.role is Role.PS for task in cluster.tasks),
    )
