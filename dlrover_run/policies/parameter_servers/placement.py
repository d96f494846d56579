"""Which node hosts which task: by the rooms that nodes offer, and where it was before if that goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from dlrover_run.coordination.records import NodeKey
from dlrover_run.policies.parameter_servers.budgets import limit_of, spent_of, with_spent
from dlrover_run.policies.parameter_servers.model import Cluster, Role, Task, TaskKey
from dlrover_run.policies.parameter_servers.orders import host_of
from dlrover_run.policies.parameter_servers.rules import ClusterRules
from dlrover_run.policies.parameter_servers.view import ClusterView, tasks_of

Places = dict[int, NodeKey]
"""The node of each rank of a role."""


def rooms(scene: ClusterView, role: Role) -> dict[NodeKey, int]:
    """How many tasks of that role each node may host."""
    found: dict[NodeKey, int] = {}
    for p in scene.hosts:
        assert p.status.cluster is not None, "only such nodes are hosts"
        tasks = sum(room.slots for room in p.status.cluster.capacity if room.role is role)
        if tasks:
            found[p.status.key] = tasks
    return found


def spread(ranks: Iterable[int], free: Mapping[NodeKey, int], before: Mapping[int, NodeKey]) -> Places:
    """The ranks on nodes with `free` rooms, each where it was `before` if it can stay, the others evenly; those for
    which there is no room, the highest, are left out."""
    ranks = list(ranks)
    left = dict(free)
    given = dict.fromkeys(free, 0)
    places: Places = {}

    def seat(rank: int, node: NodeKey) -> None:
        places[rank] = node
        left[node] -= 1
        given[node] += 1

    for rank in ranks:
        node = before.get(rank)
        if node is not None and left.get(node, 0) > 0:
            seat(rank, node)
    for rank in ranks:
        able = [node for node, rooms_left in left.items() if rooms_left > 0]
        if rank not in places and able:
            # The first of those with the fewest: their order is a natural one.
            seat(rank, min(able, key=lambda node: given[node]))
    return _close_gaps(ranks, places)


def _close_gaps(ranks: list[int], places: Places) -> Places:
    """The same nodes for the lowest ranks: a list of servers has no gaps."""
    wanted = ranks[: len(places)]
    spare = [places[rank] for rank in ranks if rank in places and rank not in wanted]
    return {rank: places[rank] if rank in places else spare.pop(0) for rank in wanted}


def places_of(tasks: Iterable[Task]) -> Places:
    """Where the tasks of one role are."""
    return {task.rank: host_of(task) for task in tasks}


def wanted_servers(limits: ClusterRules, cluster: Cluster) -> int:
    """How many parameter servers the job shall have if there is room."""
    most = limits.max_ps if cluster.server_bounds is None else min(limits.max_ps, cluster.server_bounds.most)
    return clip(cluster.desired.ps, least_servers(limits, cluster), most)


def least_servers(limits: ClusterRules, cluster: Cluster) -> int:
    """How many parameter servers the job cannot do without."""
    return limits.min_ps if cluster.server_bounds is None else max(limits.min_ps, cluster.server_bounds.least)


def wanted_workers(limits: ClusterRules, cluster: Cluster) -> list[int]:
    """The ranks that workers shall have if there is room: those who have succeeded are not needed again."""
    number = clip(cluster.desired.workers, limits.min_workers, limits.max_workers)
    return [rank for rank in range(number) if rank not in cluster.succeeded_workers]


def clip(target: int | None, least: int, most: int) -> int:
    """What may be had of what is wanted."""
    return most if target is None else max(least, min(target, most))


def give(
    scene: ClusterView, cluster: Cluster, role: Role, rank: int, version: int, node: NodeKey
) -> tuple[Cluster, Task]:
    """A new task, with an id that none had before."""
    spent = spent_of(cluster, role)
    number = max(spent.ids, scene.unseen_id(role))
    task = Task(
        key=TaskKey(role, number),
        rank=rank,
        version=version,
        node_id=node.node_id,
        incarnation=node.incarnation,
        host=scene.present[node].status.host,
        memory=limit_of(scene.limits, cluster, role, rank),
        since=scene.now,
    )
    return with_spent(cluster, msgspec.structs.replace(spent, ids=number + 1)), task


def give_all(
    scene: ClusterView, cluster: Cluster, role: Role, places: Places, version: int
) -> tuple[Cluster, tuple[Task, ...]]:
    """New tasks of that role at those places."""
    tasks = []
    for rank, node in sorted(places.items()):
        cluster, task = give(scene, cluster, role, rank, version, node)
        tasks.append(task)
    return cluster, tuple(tasks)


def free_rooms(scene: ClusterView, cluster: Cluster, role: Role) -> dict[NodeKey, int]:
    """The rooms of that role that no task of this version has."""
    left = rooms(scene, role)
    for task in tasks_of(cluster, role):
        if host_of(task) in left:
            left[host_of(task)] -= 1
    return left


def place_one(
    scene: ClusterView, cluster: Cluster, role: Role, rank: int, before: NodeKey | None = None
) -> NodeKey | None:
    """A node with room for one more task of that role: the one of `before` if it can, else the one that hosts the
    fewest of them."""
    left = free_rooms(scene, cluster, role)
    if before is not None and left.get(before, 0) > 0:
        return before
    hosted = dict.fromkeys(left, 0)
    for task in tasks_of(cluster, role):
        if host_of(task) in hosted:
            hosted[host_of(task)] += 1
    able = [node for node, number in left.items() if number > 0]
    return min(able, key=lambda node: hosted[node], default=None)
