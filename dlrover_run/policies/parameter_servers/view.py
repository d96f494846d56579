"""What a decision on a cluster looks at: who is here, what became of each task, and until when it has time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from dlrover_run.coordination.presence import Presence, Present
from dlrover_run.coordination.records import NodeKey, Plan
from dlrover_run.coordination.rules import Rules
from dlrover_run.coordination.seating import natural_order
from dlrover_run.coordination.words import departure
from dlrover_run.policies.parameter_servers.model import (
    Cluster,
    EndCause,
    Role,
    Task,
    TaskEnd,
    TaskKey,
    TaskStage,
    TaskStatus,
)
from dlrover_run.policies.parameter_servers.orders import host_of
from dlrover_run.policies.parameter_servers.rules import ClusterRules


@dataclass(frozen=True)
class Loss:
    """A task that has ended or is given up. A `free` one costs nothing: its node is gone, or goes."""

    task: Task
    end: TaskEnd
    free: bool = False


@dataclass(frozen=True)
class ClusterView:
    """The rules, what is known of each node, and the job time."""

    rules: Rules
    present: Present
    now: float

    @property
    def limits(self) -> ClusterRules:
        """The rules of the cluster."""
        assert self.rules.cluster is not None, "the job has parameter servers"
        return self.rules.cluster

    @cached_property
    def hosts(self) -> list[Presence]:
        """The nodes that may be given a task, in a natural order."""
        able = (p for p in self.present.values() if p.can_train and p.status.cluster is not None)
        return sorted(able, key=lambda p: (natural_order(p.status.host), p.arrived, p.status.key))

    @cached_property
    def _told(self) -> dict[tuple[NodeKey, TaskKey], TaskStatus]:
        return {
            (key, told.key): told
            for key, p in self.present.items()
            if p.status.cluster is not None
            for told in p.status.cluster.tasks
        }

    @cached_property
    def _ids(self) -> dict[Role, int]:
        ids: dict[Role, int] = {}
        for _, key in self._told:
            ids[key.role] = max(ids.get(key.role, -1), key.id)
        return ids

    def unseen_id(self, role: Role) -> int:
        """An id above all that any node speaks of: a predecessor without a journal may have given them."""
        return self._ids.get(role, -1) + 1

    def gone(self, key: NodeKey) -> bool:
        """Whether that node is lost, or has left."""
        p = self.present.get(key)
        return p is None or p.lost(self.now) or p.left

    def going(self, key: NodeKey) -> bool:
        """Whether that node is gone, or was asked to go."""
        return self.gone(key) or self.present[key].going

    def departure(self, task: Task) -> str:
        """That the task's node goes, and because of which signal if that is known."""
        p = self.present.get(host_of(task))
        return f"{task.host} {departure(p.status.ended_by if p is not None else '')}"

    def broken(self, plan: Plan) -> float | None:
        """When it is known of the last member whose connection has just broken whether it is lost, if there is one."""
        times = (self.present[m.key].lost_at for m in plan.members if not self.gone(m.key))
        return max((time for time in times if time is not None), default=None)

    def told(self, task: Task) -> TaskStatus | None:
        """What its host has said of the task last."""
        return self._told.get((host_of(task), task.key))

    def stage(self, task: Task) -> TaskStage | None:
        """How far the task is; None while its host has said nothing of it."""
        told = self.told(task)
        return None if told is None else told.stage

    def ready(self, task: Task) -> bool:
        """Whether the task is ready, and its host here."""
        return self.stage(task) is TaskStage.READY and not self.gone(host_of(task))

    def succeeded(self, task: Task) -> bool:
        """Whether the task has ended with exit code 0, whatever became of its node then."""
        told = self.told(task)
        return told is not None and told.end is not None and told.end.cause is EndCause.SUCCESS

    def loss(self, cluster: Cluster, task: Task) -> Loss | None:
        """How the task was lost, if it was."""
        told = self.told(task)
        host = host_of(task)
        if told is not None and told.stage is TaskStage.ENDED:
            end = told.end or TaskEnd(EndCause.FAILURE, "has ended")
            return Loss(task, end, free=self.going(host))
        if self.gone(host):
            p = self.present.get(host)
            how = "left with its node" if p is not None and p.left else "was lost with its node"
            return Loss(task, TaskEnd(EndCause.RESHAPED, how), free=True)
        deadline = self.deadline(cluster, task)
        if deadline is not None and self.now >= deadline:
            what = f"was not ready after {self.limits.ready_timeout:g} s"
            return Loss(task, TaskEnd(EndCause.FAILURE, what))
        return None

    def losses(self, cluster: Cluster, tasks: tuple[Task, ...]) -> list[Loss]:
        """Those of the tasks that were lost."""
        return [loss for task in tasks if (loss := self.loss(cluster, task)) is not None]

    def deadline(self, cluster: Cluster, task: Task) -> float | None:
        """When the task is given up unless it is ready by then; None while it waits for others, or nobody for it."""
        stage = self.stage(task)
        if stage is TaskStage.READY or task.role is Role.EVALUATOR:
            return None
        coming = task.version > cluster.version
        ports_held_at = cluster.next_ports_held_at if coming else cluster.ports_held_at
        milestones = [task.since, ports_held_at]
        if ports_held_at is None and task.port:
            # It is another one that holds no port yet.
            return None
        if task.role is Role.CHIEF:
            if ports_held_at is not None and cluster.servers_ready_at is None:
                return None
            milestones.append(cluster.servers_ready_at)
        if task.role is Role.WORKER:
            if stage is TaskStage.STARTED and cluster.opened_at is None:
                return None
            milestones.append(cluster.opened_at)
        return max(time for time in milestones if time is not None) + self.limits.ready_timeout


def tasks_of(cluster: Cluster, role: Role) -> tuple[Task, ...]:
    """The tasks of that role in this version."""
    return tuple(task for task in cluster.tasks if task.role is role)


def holds_queues(cluster: Cluster) -> bool:
    """Whether the queues of the data may be in use on the chief's node. They are lost with it, and a live model would
    go on with none of them used, so that another node gets the chief only in the next version."""
    return cluster.servers_ready_at is not None


def leftovers(scene: ClusterView, plan: Plan, cluster: Cluster) -> list[tuple[NodeKey, TaskKey | None]]:
    """Tasks that nobody wants any more and that may run still, with their nodes; None for what is not known of a
    member that was not heard since its coordinator began.

    A node starts a task only after it has said that it holds a port for it, so none runs that no status shows.
    """
    wanted = {task.key for task in (*cluster.tasks, *cluster.next_servers)}
    members = {member.key for member in plan.members}
    found: list[tuple[NodeKey, TaskKey | None]] = []
    for key, p in scene.present.items():
        if scene.gone(key):
            continue
        if key in members and p.broken == -math.inf:
            # It is expected back, and has said nothing yet.
            found.append((key, None))
        hosted = () if p.status.cluster is None else p.status.cluster.tasks
        found += [(key, told.key) for told in hosted if told.stage is not TaskStage.ENDED and told.key not in wanted]
    return found
