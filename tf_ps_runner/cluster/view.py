"""What a decision looks at: the nodes, the state of each task, and how long each task has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from dlrover_run.coordination.decision import update_plan
from dlrover_run.coordination.membership import KnownNode, Nodes
from dlrover_run.coordination.records.plan import Plan
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds.ranks import natural_order
from dlrover_run.features.autoscale.rules import AutoscaleRules
from dlrover_run.words.reasons import Code, Reasons, chain, shown_names
from tf_ps_runner.cluster.model import (
    Cluster,
    EndCause,
    PlannedTask,
    Role,
    TaskEnd,
    TaskKey,
    TaskStage,
    TaskStatus,
)
from tf_ps_runner.cluster.reports import NodeTasks
from tf_ps_runner.cluster.rules import ROLES, ClusterRules, Milestone


@dataclass(frozen=True)
class LostTask:
    """A task that has ended or is given up. A `free` one costs no restart: its node is lost or leaving."""

    task: PlannedTask
    end: TaskEnd
    free: bool = False


@dataclass(frozen=True)
class ClusterView:
    """The rules, what is known of each node, and the job time."""

    rules: JobRules
    nodes: Nodes
    now: float

    @cached_property
    def limits(self) -> ClusterRules:
        """The rules of the job's first node; and an evaluator if any node offers a slot for one. A node of the role
        evaluator (`--role=evaluator` in its pod) may join after others that have not asked for an evaluator."""
        rules = ClusterRules.get(self.rules.parts)
        if rules.evaluator or not any(
            slot.role is Role.EVALUATOR and slot.slots
            for key, tasks in self.node_tasks.items()
            for slot in tasks.capacity
            if not self.is_lost(key)
        ):
            return rules
        return msgspec.structs.replace(rules, evaluator=1)

    @property
    def autoscale(self) -> AutoscaleRules:
        return AutoscaleRules.get(self.rules.parts)

    @cached_property
    def hosts(self) -> list[KnownNode]:
        """The nodes that may be assigned tasks, in natural order."""
        able = (p for p in self.nodes.values() if p.is_available and NodeTasks.find(p.report.parts) is not None)
        return sorted(able, key=lambda p: (natural_order(p.report.host), p.joined_at, p.report.key))

    @cached_property
    def node_tasks(self) -> dict[NodeKey, NodeTasks]:
        parts = ((key, NodeTasks.find(p.report.parts)) for key, p in self.nodes.items())
        return {key: part for key, part in parts if part is not None}

    @cached_property
    def _statuses(self) -> dict[tuple[NodeKey, TaskKey], TaskStatus]:
        return {(key, status.key): status for key, reported in self.node_tasks.items() for status in reported.tasks}

    @cached_property
    def _ids(self) -> dict[Role, int]:
        ids: dict[Role, int] = {}
        for _, key in self._statuses:
            ids[key.role] = max(ids.get(key.role, -1), key.id)
        return ids

    def next_unseen_id(self, role: Role) -> int:
        """An id above all that nodes report: a predecessor without a journal may have given those out."""
        return self._ids.get(role, -1) + 1

    def is_lost(self, key: NodeKey) -> bool:
        """Whether that node is lost, or has left."""
        p = self.nodes.get(key)
        return p is None or p.is_lost(self.now) or p.has_left

    def is_leaving(self, key: NodeKey) -> bool:
        """Whether that node is lost, or was asked to leave. Asked for tasks that have to move (`cluster/failures`,
        `cluster/reshape`), and for places that tasks may keep (`cluster/placement`, `cluster/versions`)."""
        return self.is_lost(key) or self.nodes[key].is_draining

    def is_disconnected(self, key: NodeKey) -> bool:
        """Whether the connection of that node has just broken, and the node may still come back."""
        return not self.is_lost(key) and not self.nodes[key].connected

    def pending_reconnect(self, plan: Plan) -> float | None:
        """The time at which each member with a broken connection is either back or lost; None without such members.
        Asked by each rule before a loss or a change costs something: more nodes may be lost with the first."""
        times = (self.nodes[m.key].lost_at for m in plan.members if not self.is_lost(m.key))
        return max((time for time in times if time is not None), default=None)

    def status_of(self, task: PlannedTask) -> TaskStatus | None:
        """What the node of the task has last reported of it; None before that. Asked for what only a report has:
        memory, steps, ports, bounds (`cluster/reshape`, `cluster/scaling`, `cluster/versions`), and by the questions
        below."""
        return self._statuses.get((host_of(task), task.key))

    def stage_of(self, task: PlannedTask) -> TaskStage | None:
        """How far the task is; None while its node has not reported it."""
        status = self.status_of(task)
        return None if status is None else status.stage

    def runs(self, task: PlannedTask) -> bool:
        return self.stage_of(task) in (TaskStage.STARTED, TaskStage.READY)

    def is_ready(self, task: PlannedTask) -> bool:
        """Whether the task is ready, and its node here. Asked before a version lets its workers in
        (`cluster/versions`), before the servers change (`cluster/reshape`), and before a size is measured
        (`cluster/autoscaling`)."""
        return self.stage_of(task) is TaskStage.READY and not self.is_lost(host_of(task))

    def has_succeeded(self, task: PlannedTask) -> bool:
        """Whether the task has ended with exit code 0, even if its node was lost after that."""
        status = self.status_of(task)
        return status is not None and status.end is not None and status.end.cause is EndCause.SUCCESS

    def loss_of(self, cluster: Cluster, task: PlannedTask) -> LostTask | None:
        """How the task was lost: it has ended, its node is lost, or it was not ready in time; None while it is not.
        Asked by each rule about tasks that end (`cluster/failures`), and when a change concludes or a version takes its
        next servers (`cluster/reshape`, `cluster/versions`)."""
        status, host = self.status_of(task), host_of(task)
        if status is not None and status.stage is TaskStage.ENDED:
            end = status.end or TaskEnd(EndCause.FAILURE, "has ended")
            return LostTask(task, end, free=self.is_leaving(host))
        if self.is_lost(host):
            p = self.nodes.get(host)
            how = "left with its node" if p is not None and p.has_left else "was lost with its node"
            return LostTask(task, TaskEnd(EndCause.RESHAPED, how), free=True)
        deadline = self.ready_deadline(cluster, task)
        if deadline is not None and self.now >= deadline:
            what = f"was not ready after {self.limits.ready_timeout:g} s"
            return LostTask(task, TaskEnd(EndCause.FAILURE, what))
        return None

    def losses_of(self, cluster: Cluster, tasks: tuple[PlannedTask, ...]) -> list[LostTask]:
        """Those of the tasks that are lost. Called for the servers (`cluster/failures`), the next servers
        (`cluster/reshape`), and workers whose number was only tried (`cluster/autoscaling`)."""
        return [loss for task in tasks if (loss := self.loss_of(cluster, task)) is not None]

    def ready_deadline(self, cluster: Cluster, task: PlannedTask) -> float | None:
        """When the task is given up unless it is ready by then; None while it waits for other tasks, or has no limit.
        Called by `loss_of`, and for the deadlines of the engine."""
        stage, after = self.stage_of(task), ROLES[task.role].ready_after
        if stage is TaskStage.READY or after is None:
            return None
        is_next = task.version > cluster.version
        ports_held_at = cluster.next_ports_held_at if is_next else cluster.ports_held_at
        if ports_held_at is None and task.port:
            # Another task has no port yet.
            return None
        milestones = [task.since, ports_held_at]
        if after is Milestone.SERVERS:
            if ports_held_at is not None and cluster.servers_ready_at is None:
                return None
            milestones.append(cluster.servers_ready_at)
        if after is Milestone.MODEL:
            if stage is TaskStage.STARTED and cluster.opened_at is None:
                return None
            milestones.append(cluster.opened_at)
        return max(time for time in milestones if time is not None) + self.limits.ready_timeout

    def leftover_tasks(self, plan: Plan, cluster: Cluster) -> list[tuple[NodeKey, TaskKey | None]]:
        """Tasks that the plan does not want any more and that may still run, with their nodes; None for the unknown
        tasks of a member that has not reported since this coordinator began.

        A node starts a task only after it has reported a port for it, so no task runs without being in a report.
        """
        wanted = {task.key for task in (*cluster.tasks, *cluster.next_servers)}
        members = {member.key for member in plan.members}
        found: list[tuple[NodeKey, TaskKey | None]] = []
        for key, p in self.nodes.items():
            if self.is_lost(key):
                continue
            if key in members and p.disconnected_at == -math.inf:
                # It is expected back, and has not reported yet.
                found.append((key, None))
            reported = self.node_tasks[key].tasks if key in self.node_tasks else ()
            found += [(key, one.key) for one in reported if one.stage is not TaskStage.ENDED and one.key not in wanted]
        return found

    def departures(self, tasks: Sequence[PlannedTask]) -> Reasons:
        """That the nodes of these tasks leave, and because of which signal where that is known."""
        hosts: dict[str, list[str]] = {}
        for node, host in {host_of(task): task.host for task in tasks}.items():
            p = self.nodes.get(node)
            hosts.setdefault("" if p is None else p.report.ended_by, []).append(host)
        return tuple(
            Code.ENDED_BY_SIGNAL(names=shown_names(names), number=len(names), signal=signal)
            if signal
            else Code.ASKED_TO_LEAVE(names=shown_names(names), number=len(names))
            for signal, names in hosts.items()
        )

    def update(self, plan: Plan, cluster: Cluster, reasons: Reasons | None = None, **changes: Any) -> Plan:
        """The plan with these changes of the cluster, and with other reasons if there are any."""
        values: dict[str, Any] = {} if reasons is None else {"reasons": chain(reasons)}
        return update_plan(plan, self.now, part=msgspec.structs.replace(cluster, **changes), **values)


def host_of(task: PlannedTask) -> NodeKey:
    return NodeKey(task.node_id, task.incarnation)


def tasks_of(cluster: Cluster, role: Role) -> tuple[PlannedTask, ...]:
    return tuple(task for task in cluster.tasks if task.role is role)


def without(cluster: Cluster, *tasks: PlannedTask) -> Cluster:
    keys = {task.key for task in tasks}
    return msgspec.structs.replace(cluster, tasks=tuple(one for one in cluster.tasks if one.key not in keys))


def with_task(cluster: Cluster, task: PlannedTask) -> Cluster:
    """The cluster with that task too. Called by `cluster/failures` for each task that starts while a version runs."""
    return msgspec.structs.replace(cluster, tasks=(*cluster.tasks, task))
