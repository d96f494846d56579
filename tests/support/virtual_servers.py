"""The virtual job whose program is parameter servers: tasks of nodes, and what their cluster has come to."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.requests import Action
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.words.reasons import codes
from support.policy_parts import cluster_of, tasks_of
from support.virtual import COMMON_EVENTS, COMMON_FACTS, VirtualJob
from tf_ps_runner.cluster.engine import ClusterEngine
from tf_ps_runner.cluster.model import (
    Capacity,
    Cluster,
    EndCause,
    PlannedTask,
    Role,
    RoleState,
    ScaleRequest,
    Stage,
    TaskEnd,
    TaskKey,
    TaskStage,
    TaskStatus,
)
from tf_ps_runner.cluster.orders import NodeOrder
from tf_ps_runner.cluster.reports import NodeTasks
from tf_ps_runner.cluster.rules import ClusterRules

KILLED = TaskEnd(EndCause.FAILURE, "was killed by SIGKILL")
LEFT = TaskEnd(EndCause.RESHAPED, "left, for the cluster has changed")
SUCCESS = TaskEnd(EndCause.SUCCESS, "exited with code 0")
OUT_OF_MEMORY = TaskEnd(EndCause.MEMORY, "was killed for its memory")
SILENT = TaskEnd(EndCause.SILENT, "does not answer")
REPEATED = TaskEnd(EndCause.REPEATED, "raised ValueError: no such column", "Traceback: ...")


def rules(ps: int = 2, workers: int = 2, **changes: object) -> JobRules:
    """Return the rules of a job with that many servers and workers, and other fields by name."""
    numbers = {"min_ps": ps, "max_ps": ps, "min_workers": 0, "max_workers": workers}
    return JobRules(max_nodes=8, parts=(ClusterRules(**{**numbers, **changes}),))  # type: ignore[arg-type]


class ServersJob(VirtualJob):
    """A job whose nodes reserve, start and end tasks at once as ordered, unless the test does otherwise."""

    def __init__(self, rules: JobRules) -> None:
        super().__init__(rules, 1)

    @property
    def cluster(self) -> Cluster:
        assert cluster_of(self.plan) is not None
        return cluster_of(self.plan)

    @property
    def stage(self) -> Stage:
        return self.cluster.stage

    def ids(self, role: Role) -> list[str]:
        tasks = sorted((task for task in self.cluster.tasks if task.role is role), key=lambda task: task.rank)
        return [str(task.key) for task in tasks]

    def memory(self, role: Role) -> list[str]:
        tasks = sorted((task for task in self.cluster.tasks if task.role is role), key=lambda task: task.rank)
        return [str(task.memory_mib) for task in tasks]

    def hosts(self, role: Role) -> list[str]:
        tasks = sorted((task for task in self.cluster.tasks if task.role is role), key=lambda task: task.rank)
        return [task.host for task in tasks]

    def spent(self, role: Role) -> RoleState:
        return next((spent for spent in self.cluster.roles if spent.role is role), RoleState(role))

    def order(self, name: str) -> NodeOrder:
        """Return the order of a node that hosts tasks."""
        order = self.order_if_any(name)
        assert order is not None, f"{name} has no order"
        return order

    def order_if_any(self, name: str) -> NodeOrder | None:
        return ClusterEngine(self.rules).orders(self.plan, {}).get(self.statuses[name].key)

    def works(self, name: str) -> bool:
        return self.plan.phase is PlanPhase.TRAINING and self.order_if_any(name) is not None

    def come(self, name: str, chief: int = 1, workers: int = 2, ps: int = 2, evaluator: int = 0, **others: int) -> None:
        """A node joins, with slots for these roles and for `others` by name."""
        numbers = {Role.CHIEF: chief, Role.WORKER: workers, Role.PS: ps, Role.EVALUATOR: evaluator}
        numbers |= {Role(name): number for name, number in others.items()}
        rooms = tuple(Capacity(role, number) for role, number in numbers.items() if number)
        self.statuses[name] = NodeReport(
            node_id=name,
            incarnation="1",
            host=name,
            address=name,
            port=1,
            workers=0,
            parts=(NodeTasks(capacity=rooms),),
        )
        self.away.discard(name)
        self.send(name)

    def obey(self) -> None:
        """All nodes carry out their orders, and report it, until nothing changes: they reserve and release ports, start
        the tasks that may start, and end undesired tasks at once. No task becomes ready by itself."""
        for _ in range(20):
            changed = [self._obey(name) for name in self.present if name not in self.deaf]
            if not any(changed):
                return
        raise AssertionError("the nodes never come to rest")

    def ready(self, *names: str, restored: int = 0, reached: int = -1) -> None:
        for name in names:
            steps = {"restored": restored, "reached": reached} if name.startswith("chief") else {}
            self.report_task(name, TaskStage.READY, **steps)

    def train(self, restored: int = 0, reached: int = -1) -> None:
        """Let the job proceed without faults, from reserving ports to training."""
        self.obey()
        self.ready(*self.ids(Role.PS))
        self.ready(*self.ids(Role.CHIEF), restored=restored, reached=reached)
        self.ready(*self.ids(Role.WORKER))
        assert self.stage is Stage.TRAINING, self.plan.reason

    def report_task(self, task: str, stage: TaskStage = TaskStage.READY, **changes: object) -> None:
        """Report a new stage of a task."""
        role, number = task.rsplit("-", 1)
        key = TaskKey(Role(role), int(number))
        for name in self.present:
            status = self.statuses[name]
            assert tasks_of(status) is not None
            for known in tasks_of(status).tasks:
                if known.key == key:
                    new = msgspec.structs.replace(known, stage=stage, **changes)
                    tasks = tuple(new if one.key == key else one for one in tasks_of(status).tasks)
                    self._replace(name, tasks=tasks)
                    self.send(name)
                    return
        raise AssertionError(f"no node hosts {task}")

    def end(self, *tasks: str, how: TaskEnd = KILLED) -> None:
        for task in tasks:
            self.report_task(task, TaskStage.ENDED, end=how)

    def end_together(self, *tasks: str, how: TaskEnd = KILLED) -> None:
        """Tasks of one node end, which is reported in one report."""
        for name in self.present:
            status = self.statuses[name]
            assert tasks_of(status) is not None
            ended = tuple(
                msgspec.structs.replace(one, stage=TaskStage.ENDED, end=how) if str(one.key) in tasks else one
                for one in tasks_of(status).tasks
            )
            if ended != tasks_of(status).tasks:
                self._replace(name, tasks=ended)
                self.send(name)

    def scale(self, **targets: int) -> str:
        """An operator requests other numbers of tasks; returns the answer. Raises RequestFailed."""
        return self.request(Action.SCALE, part=ScaleRequest(**targets))

    def succeed_coordinator(self) -> None:
        """Another coordinator takes over, and receives reports from all nodes again."""
        self.coordinator = Coordinator(self.rules, self.now, self.plan.epoch + 1, self.plan)
        for name in self.present:
            self.send(name)

    def _replace(self, name: str, **changes: object) -> None:
        status = self.statuses[name]
        assert tasks_of(status) is not None
        hosting = msgspec.structs.replace(tasks_of(status), **changes)
        self.statuses[name] = msgspec.structs.replace(status, parts=(hosting,))

    def _obey(self, name: str) -> bool:
        order, hosting = self.order_if_any(name), tasks_of(self.statuses[name])
        assert hosting is not None
        wanted = {} if order is None else {task.key: task for task in order.tasks}
        tasks = [task for task in hosting.tasks if task.key in wanted or order is None]
        here = {task.key for task in tasks}
        tasks += [
            TaskStatus(key=key, stage=TaskStage.HELD, port=next(self._ports)) for key in wanted if key not in here
        ]
        started = []
        for task in tasks:
            begins = task.stage is TaskStage.HELD and order is not None and _may_start(order, wanted[task.key])
            started.append(msgspec.structs.replace(task, stage=TaskStage.STARTED) if begins else task)
        if tuple(started) == hosting.tasks:
            return False
        self._replace(name, tasks=tuple(started))
        self.send(name)
        return True


def _numbers(words: list[str]) -> dict[str, int]:
    return {name: int(number) for name, _, number in (word.partition("=") for word in words)}


EVENTS: dict[str, Callable[[ServersJob, list[str]], object]] = {
    **COMMON_EVENTS,
    "come": lambda job, words: job.come(words[0], **_numbers(words[1:])),
    "obey": lambda job, _: job.obey(),
    "train": lambda job, words: job.train(**_numbers(words)),
    "ready": lambda job, tasks: job.ready(*tasks),
    "end": lambda job, tasks: job.end(*tasks),
    "step": lambda job, words: job.report_task(words[0], TaskStage.READY, **_numbers(words[1:])),
    "saved": lambda job, words: job.report_task(
        words[0], TaskStage.ENDED, step=int(words[1]), saved=int(words[1]), end=LEFT
    ),
    "oom": lambda job, tasks: job.end(*tasks, how=OUT_OF_MEMORY),
    "oom_together": lambda job, tasks: job.end_together(*tasks, how=OUT_OF_MEMORY),
    "end_together": lambda job, tasks: job.end_together(*tasks),
    "silent": lambda job, tasks: job.end(*tasks, how=SILENT),
    "reshaped": lambda job, tasks: job.end(*tasks, how=LEFT),
    "succeed": lambda job, tasks: job.end(*tasks, how=SUCCESS),
    "scale": lambda job, words: job.scale(**_numbers(words)),
    "successor": lambda job, _: job.succeed_coordinator(),
}
"""The events of a script, with the names of nodes or tasks, a time, or numbers of tasks. A task that has
`saved` left for a change at that step."""

FACTS: dict[str, Callable[[ServersJob], list[str]]] = {
    **COMMON_FACTS,
    "because": lambda job: [code.removeprefix("parameter_servers.") for code in codes(job.plan.reasons)],
    "stage": lambda job: [job.stage.value],
    "outcome": lambda job: [] if job.cluster.outcome is None else [job.cluster.outcome.cause.value],
    "next": lambda job: [str(task.key) for task in job.cluster.next_servers],
    "next_on": lambda job: [task.host for task in job.cluster.next_servers],
    "failures": lambda job: [f"{role.value}={number}" for role in Role if (number := job.spent(role).failures)],
    "memory_restarts": lambda job: [
        f"{role.value}={number}" for role in Role if (number := job.spent(role).memory_restarts)
    ],
    "open": lambda job: [name for name in job.present if (order := job.order_if_any(name)) is not None and order.open],
    **{role.value: lambda job, role=role: job.ids(role) for role in Role},  # type: ignore[misc]
    **{f"{role.value}_memory": lambda job, role=role: job.memory(role) for role in Role},  # type: ignore[misc]
    **{f"{role.value}_on": lambda job, role=role: job.hosts(role) for role in Role},  # type: ignore[misc]
}
"""The facts that a script may check. A role has its tasks by rank, the nodes that they are on, and the MiB of
each. The gate is `open` on those nodes."""


ServersJob.EVENTS, ServersJob.FACTS = EVENTS, FACTS


def _may_start(order: NodeOrder, task: PlannedTask) -> bool:
    servers = order.servers if task.version == order.version else order.next_servers
    listed = {Role.CHIEF: (order.chief,), Role.WORKER: order.workers, Role.PS: servers}
    return bool(servers) and task.port > 0 and task.endpoint in listed.get(task.role, (task.endpoint,))
