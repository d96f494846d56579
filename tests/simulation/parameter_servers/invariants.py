"""The invariants of every run of a job with parameter servers: for its processes, and for each plan that is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.policy_parts import cluster_of, tasks_of

from dlrover_run.coordination.membership import Nodes
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from simulation.timeline import demand
from tf_ps_runner.cluster.model import (
    Cluster,
    EndCause,
    PlannedTask,
    Role,
    RoleState,
    Stage,
    TaskEnd,
    TaskKey,
    TaskStage,
    TaskStatus,
)
from tf_ps_runner.cluster.rules import ROLES
from tf_ps_runner.cluster.view import host_of

if TYPE_CHECKING:
    from simulation.parameter_servers.nodes import ServerNode as Node
    from simulation.parameter_servers.program import ServersProgram as World
    from simulation.parameter_servers.tensorflow import Process

COSTLY = frozenset({EndCause.FAILURE, EndCause.SILENT, EndCause.REPEATED})
SERVED = (Stage.TRAINING, Stage.CHANGING, Stage.PAUSING, Stage.SAVING)


class ClusterInvariants:
    """Checks the actions of processes and the stored plans. A node that is cut off may carry out its last order until
    it is connected again, because no other process can stop it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.was_cut = False
        self._tasks: dict[TaskKey, PlannedTask] = {}
        self._started: set[TaskKey] = set()
        self._opened = 0
        self._opened_versions: set[int] = set()
        self._saved: dict[int, int] = {}
        self.spared: set[int] = set()
        self._charged: set[TaskKey] = set()

    def started(self, node: Node, task: PlannedTask) -> None:
        demand(task.key not in self._started, f"{task.key} is started twice")
        self._started.add(task.key)
        if task.role is Role.CHIEF and not _cut_off(node):
            others = [p for p in self._in_touch() if p.task.role is Role.CHIEF]
            demand(not others, f"{task.key} is started while {others and others[0].task.key} lives")

    def ended(self, task: PlannedTask, end: TaskEnd) -> None:
        """Note that a task has ended, with the exit that its node reports."""

    def restored(self, chief: Process, step: int) -> None:
        before = chief.task.version - 1
        if before in self.spared and not self.was_cut:
            demand(
                step == self._saved[before], f"version {before + 1} begins at {step}, saved was {self._saved[before]}"
            )

    def chief_ready(self, chief: Process) -> None:
        if not _cut_off(chief.node):
            for other in self._in_touch():
                same = other is chief or other.task.role is not Role.CHIEF or not other.ready
                demand(same, f"two chiefs are at work: {chief.task.key} and {other.task.key}")

    def passes_gate(self, worker: Process) -> None:
        if not _cut_off(worker.node):
            version = worker.task.version
            demand(
                version in self._opened_versions, f"{worker.task.key} passes the gate before version {version} opens"
            )
            demand(
                version >= self._opened, f"{worker.task.key} passes the gate of version {version} after {self._opened}"
            )
            self._opened = version

    def trains(self, process: Process) -> None:
        if _cut_off(process.node):
            return
        version = process.task.version
        demand(version >= self._opened, f"{process.task.key} trains in version {version} after {self._opened} opened")
        demand(version not in self._saved, f"{process.task.key} trains though version {version} was saved and left")

    def saved_and_left(self, chief: Process) -> None:
        if _cut_off(chief.node):
            return
        version = chief.task.version
        busy = [p for p in self._in_touch() if p.trains and p.task.version == version]
        demand(not busy, f"{chief.task.key} saves while {busy and busy[0].task.key} trains")
        self._saved[version] = chief.saved

    def lost_tasks(self, plan: Plan) -> frozenset[TaskKey]:
        """Return the tasks of the plan that do not run now, or that run on a node that is cut off."""
        return frozenset(task.key for task in (cluster_of(plan) or Cluster()).tasks if self._lost(task))

    def decided(self, before: Plan, plan: Plan, present: Nodes, lost: frozenset[TaskKey]) -> None:
        """Check a plan that is stored. `lost` are the tasks that were lost at the time of the decision: a node that
        was cut off then may have reconnected before a slow network has stored the plan."""
        cluster, former = cluster_of(plan), cluster_of(before) or Cluster()
        demand(bool(plan.reason), "a plan has no reason")
        if cluster is None:
            return
        self._look_at_tasks(plan, cluster, present)
        if plan.phase is PlanPhase.TRAINING and former.version == cluster.version:
            self._same_version(former, cluster)
        if cluster.version > former.version > 0:
            self._next_version(before, former, plan, present, lost)
        if cluster.opened_at is not None and (former.version, former.opened_at) != (cluster.version, cluster.opened_at):
            self._opens(cluster, present)
        self._count(before, former, plan, cluster, present)
        if plan.phase is PlanPhase.FINISHED:
            demand(self.world.disk.most >= self.world.goal, "the job is finished before the chief has reached its goal")
        if plan.phase is PlanPhase.FAILED:
            known = ("room", "left", "restart", "not allowed", "does not end", "twice", "is here", "are here")
            demand(any(word in plan.reason for word in known), f"the job failed for no valid reason: {plan.reason}")

    def _in_touch(self) -> list[Process]:
        return [p for node in self.world.living() if not _cut_off(node) for p in node.processes()]

    def _look_at_tasks(self, plan: Plan, cluster: Cluster, present: Nodes) -> None:
        limits = self.world.limits
        for task in (*cluster.tasks, *cluster.next_servers):
            known = self._tasks.setdefault(task.key, task)
            same = (known.rank, known.version, host_of(known)) == (task.rank, task.version, host_of(task))
            demand(same, f"{task.key} is in the plan twice")
        if plan.phase is not PlanPhase.TRAINING:
            return
        demand(plan.key.number == cluster.version, "the round is not the version")
        for tasks in (cluster.tasks, cluster.next_servers):
            places = [(task.role, task.rank) for task in tasks]
            demand(len(places) == len(set(places)), "two tasks have one rank")
            for task in tasks:
                p = present.get(host_of(task))
                if p is not None and tasks_of(p.report) is not None and tasks_of(p.report).capacity:
                    room = sum(room.slots for room in tasks_of(p.report).capacity if room.role is task.role)
                    hosted = sum(one.role is task.role and host_of(one) == host_of(task) for one in tasks)
                    demand(
                        hosted <= room, f"{task.node_id} hosts {hosted} tasks like {task.key}, and has room for {room}"
                    )
        for tasks in filter(None, (cluster.tasks, cluster.next_servers)):
            ranks = sorted(task.rank for task in tasks if task.role is Role.PS)
            demand(ranks == list(range(len(ranks))), f"the servers have ranks {ranks}")
            demand(limits.min_ps <= len(ranks) <= limits.max_ps, f"there are {len(ranks)} servers")
        versions = {task.version for task in cluster.tasks if not ROLES[task.role].outlives_versions}
        demand(versions <= {cluster.version}, f"tasks of versions {versions} are mixed")

    def _same_version(self, former: Cluster, cluster: Cluster) -> None:
        servers = [{task.key for task in one.tasks if task.role is Role.PS} for one in (former, cluster)]
        demand(servers[0] == servers[1], "the servers have changed, and the version has not")
        if former.servers_ready_at is not None:
            before, after = ({host_of(t) for t in one.tasks if t.role is Role.CHIEF} for one in (former, cluster))
            demand(after <= before, "the chief is not with the queues of the data any more, and the version goes on")

    def _next_version(
        self, before: Plan, former: Cluster, plan: Plan, present: Nodes, lost_then: frozenset[TaskKey]
    ) -> None:
        if before.phase is not PlanPhase.TRAINING or former.stage in (Stage.PAUSING, Stage.SAVING):
            if former.stage is Stage.SAVING:
                self._note_spared(former, present)
            return
        # The reason names tasks that were not ready in time.
        lost = [task for task in former.tasks if task.key in lost_then or self._lost(task) or _has_left(task, present)]
        has_chief = any(task.role is Role.CHIEF for task in former.tasks)
        ends = not has_chief or any(task.role in (Role.PS, Role.CHIEF) for task in lost)
        demand(
            "was not ready" in plan.reason or ends,
            f"version {former.version} ended though its servers and its chief run: {plan.reason}",
        )

    def _note_spared(self, former: Cluster, present: Nodes) -> None:
        for task in former.tasks:
            status = _status_of(present, task)
            if task.role is not Role.CHIEF or status is None or status.end is None:
                continue
            if status.end.cause is EndCause.RESHAPED and former.version in self._saved:
                self.spared.add(former.version)

    def _lost(self, task: PlannedTask) -> bool:
        node = next((node for node in self.world.nodes if node.key == host_of(task)), None)
        if node is None or not node.alive or _cut_off(node):
            return True
        return not any(p.task.key == task.key for p in node.processes())

    def settled(self, plan: Plan, present: Nodes, now: float) -> None:
        """Check that everything that is possible has been done, when nothing is left to decide at job time `now`."""
        cluster, limits = cluster_of(plan), self.world.limits
        if plan.phase is not PlanPhase.TRAINING or cluster is None or limits is None:
            return
        if not all(p.connected and not p.is_draining for p in present.values()):
            return
        status = {task.key: _status_of(present, task) for task in cluster.tasks}
        ready = {key for key, one in status.items() if one is not None and one.stage is TaskStage.READY}
        needed = {task.key for task in cluster.tasks if task.role in (Role.PS, Role.CHIEF)}
        has_chief = any(key.role is Role.CHIEF for key in needed)
        wanted = {task.key for task in (*cluster.tasks, *cluster.next_servers)}
        here = [one for p in present.values() if tasks_of(p.report) is not None for one in tasks_of(p.report).tasks]
        fenced = any(one.key not in wanted and one.stage is not TaskStage.ENDED for one in here)
        waits = cluster.stage is Stage.STARTING and has_chief and needed <= ready and not fenced
        demand(not waits, "servers and chief are ready, and the gate is not opened")
        if cluster.stage in (Stage.PAUSING, Stage.SAVING):
            demand(now <= cluster.since + 2 * limits.save_timeout + 1, "a planned change never ends")
        if cluster.stage in (Stage.STARTING, Stage.TRAINING):
            self._full(cluster, present)
            ended = [
                task.key for task in cluster.tasks if (one := status[task.key]) is not None and one.end is not None
            ]
            demand(not ended, f"{ended and ended[0]} has ended, and stays in the plan")

    def _full(self, cluster: Cluster, present: Nodes) -> None:
        """Check that there are as many tasks as there is room for."""
        limits = self.world.limits
        most = limits.max_workers
        if (wanted := cluster.wanted(Role.WORKER, limits.min_workers)) is not None:
            most = max(limits.min_workers, min(most, wanted))
        missing = {Role.CHIEF: {0}, Role.WORKER: set(range(most)) - set(cluster.role_state(Role.WORKER).succeeded)}
        for role, ranks in missing.items():
            mine = [task for task in cluster.tasks if task.role is role]
            statuses = [tasks_of(p.report) for p in present.values() if tasks_of(p.report) is not None]
            room = sum(one.slots for status in statuses for one in status.capacity if one.role is role)
            lacks = ranks - {task.rank for task in mine}
            demand(not lacks or room <= len(mine), f"{role.value} {lacks} could be started, and is not")

    def _opens(self, cluster: Cluster, present: Nodes) -> None:
        self._opened_versions.add(cluster.version)
        for task in cluster.tasks:
            if task.role in (Role.PS, Role.CHIEF):
                status = _status_of(present, task)
                demand(status is not None and status.stage is TaskStage.READY, f"opened before {task.key} was ready")
        for process in self._in_touch():
            old = process.task.version < cluster.version and not ROLES[process.task.role].outlives_versions
            demand(not old, f"version {cluster.version} opens while {process.task.key} of an earlier version runs")

    def _count(self, before: Plan, former: Cluster, plan: Plan, cluster: Cluster, present: Nodes) -> None:
        """Check that exactly the exits were charged, each once."""
        wanted = {task.key for task in (*cluster.tasks, *cluster.next_servers)}
        gone = [task for task in (*former.tasks, *former.next_servers) if task.key not in wanted]
        same = former.version == cluster.version and plan.phase is PlanPhase.TRAINING is before.phase
        same = same and cluster.stage is not Stage.ENDING
        for role in Role:
            old, new = _spent(former, role), _spent(cluster, role)
            demand(
                new.ids >= old.ids and new.failures >= old.failures and new.memory_restarts >= old.memory_restarts,
                "a charge was undone",
            )
            mine = [task for task in gone if task.role is role]
            if plan.phase is PlanPhase.FAILED:
                mine += [task for task in former.tasks if task.role is role and task not in mine]
            failed = [task for task in mine if self._may_charge(task, present) and task.key not in self._charged]
            charges = new.failures - old.failures
            demand(charges <= len(failed), f"{charges} restarts of {role.value} were charged for {len(failed)} ends")
            if charges:
                self._charged |= {task.key for task in failed}
            if same and role is not Role.PS:
                certain = [task for task in mine if self._must_charge(former, task, present)]
                certain = [] if self.excuses(former, cluster, role) else certain
                demand(charges >= len(certain), f"{len(certain)} ends of {role.value} cost {charges} restarts")

    def excuses(self, former: Cluster, cluster: Cluster, role: Role) -> bool:
        """Whether the ends of that role cost nothing in the decision that has led to the plan."""
        return False

    def _may_charge(self, task: PlannedTask, present: Nodes) -> bool:
        status = _status_of(present, task)
        if status is None or status.end is None:
            limits = self.world.limits
            return self.world.timeline.now >= task.since + limits.ready_timeout
        return status.end.cause is not EndCause.MEMORY

    def _must_charge(self, former: Cluster, task: PlannedTask, present: Nodes) -> bool:
        status, p = _status_of(present, task), present.get(host_of(task))
        if status is None or status.end is None or p is None or p.is_draining or former.stage not in SERVED:
            return False
        if not any(node.key == host_of(task) and node.alive and not _cut_off(node) for node in self.world.nodes):
            # It was lost with its node, which is not charged.
            return False
        return status.end.cause in COSTLY


def _has_left(task: PlannedTask, present: Nodes) -> bool:
    """Whether its node was asked to leave, and is not connected any more: it is not waited for, though it may run."""
    p = present.get(host_of(task))
    return p is not None and p.has_left


def _cut_off(node: Node) -> bool:
    return node.cut or node.stale


def _spent(cluster: Cluster, role: Role) -> RoleState:
    return next((spent for spent in cluster.roles if spent.role is role), RoleState(role))


def _status_of(present: Nodes, task: PlannedTask) -> TaskStatus | None:
    p = present.get(host_of(task))
    tasks = () if p is None or tasks_of(p.report) is None else tasks_of(p.report).tasks
    return next((status for status in tasks if status.key == task.key), None)
