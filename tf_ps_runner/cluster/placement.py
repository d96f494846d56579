"""How many tasks of each role the job wants, and on which nodes they run: by capacity, and where they were before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from dlrover_run.coordination.records.round import NodeKey
from tf_ps_runner.cluster.budgets import limit_of
from tf_ps_runner.cluster.model import Cluster, PlannedTask, Role, TaskKey
from tf_ps_runner.cluster.rules import ROLES, ClusterRules
from tf_ps_runner.cluster.view import ClusterView, host_of, tasks_of

Places = dict[int, NodeKey]
"""The node of each rank of a role."""


def replica_bounds(limits: ClusterRules, cluster: Cluster, role: Role) -> tuple[int, int]:
    """The fewest and the most tasks of a role; of servers, also as the tables of the model allow. Called for the ranks
    and the minimum of a role (here), for the sizes among which a job chooses (`cluster/autoscaling`), and for the
    answer to an operator (`cluster/scaling`)."""
    least, most = limits.replicas(role)
    if role is Role.PS and cluster.server_bounds is not None:
        return max(least, cluster.server_bounds.least), min(most, cluster.server_bounds.most)
    return least, most


def desired_ranks(limits: ClusterRules, cluster: Cluster, role: Role) -> list[int]:
    """The ranks that tasks of the role shall have if capacity allows; those that have succeeded are not needed again.
    Called while nodes gather and when a version begins (`cluster/versions`), when tasks end, are missing or are too
    many (`cluster/failures`), and to see whether the servers should change (`cluster/reshape`)."""
    least, most = replica_bounds(limits, cluster, role)
    return _unfinished(cluster, role, clamp(cluster.wanted(role, least), least, most))


def most_ranks(limits: ClusterRules, cluster: Cluster, role: Role) -> list[int]:
    """The ranks that tasks of the role may have at most; those that have succeeded are not needed again."""
    return _unfinished(cluster, role, replica_bounds(limits, cluster, role)[1])


def _unfinished(cluster: Cluster, role: Role, number: int) -> list[int]:
    state = cluster.role_state(role)
    return [] if state.given_up else [rank for rank in range(number) if rank not in state.succeeded]


def min_tasks(limits: ClusterRules, cluster: Cluster, role: Role) -> int:
    """How many tasks of the role the job cannot do without. Called to see whether a version can begin
    (`cluster/versions`), has had too few tasks for too long (`cluster/failures`), or can get other servers
    (`cluster/reshape`)."""
    least, _ = replica_bounds(limits, cluster, role)
    # Tasks that never end by themselves never succeed, so all of them stay needed.
    return min(least, len(desired_ranks(limits, cluster, role))) if ROLES[role].ends_with_training else least


def clamp(desired: int | None, least: int, most: int) -> int:
    """The number within its bounds; the most for None."""
    return most if desired is None else max(least, min(desired, most))


def slots(view: ClusterView, role: Role) -> dict[NodeKey, int]:
    """The slots of each node for tasks of that role; nodes without any are left out. Called whenever tasks get their
    nodes: by `choose_node` and `server_places`, and by `versions.begin_version` for the other roles."""
    found = {}
    for p in view.hosts:
        number = sum(one.slots for one in view.node_tasks[p.report.key].capacity if one.role is role)
        if number:
            found[p.report.key] = number
    return found


def all_slots(view: ClusterView, role: Role) -> int:
    """The slots of all nodes for tasks of that role. Called while nodes gather (`cluster/versions`), for a chief that
    has to leave (`cluster/reshape`), and to see how many tasks a choice or an operator can have (`cluster/autoscaling`,
    `cluster/scaling`)."""
    return sum(slots(view, role).values())


def spread(ranks: Iterable[int], free: Mapping[NodeKey, int], before: Mapping[int, NodeKey]) -> Places:
    """The ranks on nodes with `free` slots: each where it was `before` if it can stay, the others evenly. The highest
    ranks, for which there is no slot, are left out. Called for the servers by `server_places`, and for the other roles
    when a version begins."""
    ranks = list(ranks)
    left = dict(free)
    places: Places = {}

    def put(rank: int, node: NodeKey) -> None:
        places[rank] = node
        left[node] -= 1

    for rank in ranks:
        node = before.get(rank)
        if node is not None and left.get(node, 0) > 0:
            put(rank, node)
    for rank in ranks:
        able = [node for node, number in left.items() if number > 0]
        if rank not in places and able:
            # The first of those with the fewest tasks: the nodes are in natural order.
            put(rank, min(able, key=lambda node: free[node] - left[node]))
    return _close_gaps(ranks, places)


def _close_gaps(ranks: list[int], places: Places) -> Places:
    """The same nodes for the lowest ranks: a list of servers has no gaps."""
    wanted = ranks[: len(places)]
    spare = [places[rank] for rank in ranks if rank in places and rank not in wanted]
    return {rank: places[rank] if rank in places else spare.pop(0) for rank in wanted}


def server_places(view: ClusterView, cluster: Cluster) -> Places:
    """Where the servers of the next version would be; those that can stay on their node do. Called while nodes gather
    and when a version begins (`cluster/versions`), and to see whether the servers should change (`cluster/reshape`)."""
    current = tasks_of(cluster, Role.PS)
    before = {task.rank: host_of(task) for task in current if not view.is_leaving(host_of(task))}
    return spread(desired_ranks(view.limits, cluster, Role.PS), slots(view, Role.PS), before)


def choose_node(view: ClusterView, cluster: Cluster, role: Role, before: NodeKey | None = None) -> NodeKey | None:
    """A node with a slot for one more task of that role: `before` if it has one, else the node that hosts the fewest.
    Called by `cluster/failures` for a task whose node leaves, that has ended, or that is missing."""
    free = slots(view, role)
    # Pairs, not keys: this loop runs for each of thousands of workers that end together.
    hosted = Counter((task.node_id, task.incarnation) for task in cluster.tasks if task.role is role)
    able = [node for node, number in free.items() if hosted[node] < number]
    return before if before in able else min(able, key=lambda node: hosted[node], default=None)


def new_task(
    view: ClusterView, cluster: Cluster, role: Role, rank: int, version: int, node: NodeKey
) -> tuple[Cluster, PlannedTask]:
    """A new task on that node, with an id that was never given out. Called by `cluster/failures` for the task of one
    node that leaves, one that has ended or one that is missing, and by `new_tasks`."""
    state = cluster.role_state(role)
    number = max(state.ids, view.next_unseen_id(role))
    task = PlannedTask(
        key=TaskKey(role, number),
        rank=rank,
        version=version,
        node_id=node.node_id,
        incarnation=node.incarnation,
        host=view.nodes[node].report.host,
        memory_mib=limit_of(view.limits, cluster, role, rank),
        since=view.now,
    )
    return cluster.with_role(state, ids=number + 1), task


def new_tasks(
    view: ClusterView, cluster: Cluster, role: Role, places: Places, version: int
) -> tuple[Cluster, tuple[PlannedTask, ...]]:
    """A new task for each rank, on its node. Called when a version begins (`cluster/versions`), and when servers start
    beside the current ones (`cluster/reshape`)."""
    tasks = []
    for rank, node in sorted(places.items()):
        cluster, task = new_task(view, cluster, role, rank, version, node)
        tasks.append(task)
    return cluster, tuple(tasks)
