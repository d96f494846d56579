"""Virtual jobs of both programs that choose their own size. Their throughput at each size is a given function, and
their nodes report it as agents do, with the load of servers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec
from msgspec.structs import replace

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.report import NodePhase
from dlrover_run.coordination.records.requests import Action
from dlrover_run.coordination.records.round import Failure, RoundKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.autoscale.command import CommandKey, CommandResult
from dlrover_run.features.autoscale.model import AutoscaleAssignment, AutoscaleNodeReport, AutoscaleState
from dlrover_run.features.autoscale.rules import STRONG, AutoscaleRules
from support.policy_parts import tasks_of
from support.virtual import VirtualJob
from support.virtual_servers import LEFT, OUT_OF_MEMORY, ServersJob
from support.virtual_torch import TorchJob, rules
from tf_ps_runner.cluster.choice import ReplicaChoice, ServersChoice
from tf_ps_runner.cluster.model import Role, ScaleRequest, Stage, TaskStage
from tf_ps_runner.cluster.reports import Pace, ServerLoad
from tf_ps_runner.cluster.rules import ClusterRules

LIMITS = AutoscaleRules(scaling=STRONG)
TICK = 5.0

LINEAR = {1: 10.0, 2: 20.0, 3: 30.0, 4: 40.0}
KNEE = {1: 10.0, 2: 20.0, 3: 20.5, 4: 21.0}
FLAT = {1: 10.0, 2: 10.0, 3: 10.0, 4: 10.0}


class Scaled(VirtualJob):
    """What both programs have in common: time in ticks, the search for a size, and the operator who allows it again."""

    def tick(self) -> None:
        """Let the nodes do and report what they do in one tick."""
        raise NotImplementedError

    @property
    def has_settled(self) -> bool:
        """Whether the search has ended."""
        raise NotImplementedError

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        end = self.now + seconds
        while self.now < end and not self.is_over and not until():
            self.wait(TICK)
            self.tick()

    def settle_search(self) -> None:
        """Let the job train until its search has ended, and a little longer."""
        self.run(3600, until=lambda: self.has_settled)
        self.run(100)

    def request_auto(self, *roles: Role) -> None:
        """An operator gives the size, or the numbers of these roles, back to the job."""
        self.request(Action.SCALE, part=ScaleRequest(auto=roles) if roles else None)


class ScaledJob(Scaled, TorchJob):
    """A job of at most four nodes; `curve` gives the steps per second of each size."""

    def __init__(
        self, curve: Mapping[int, float], limits: AutoscaleRules = LIMITS, least: int = 1, **more: Any
    ) -> None:
        super().__init__(rules(least, 4, parts=(limits,), **more))
        self.curve = curve
        self.kept: dict[str, AutoscaleState] = {}
        self.began: tuple[RoundKey, float] = (RoundKey(), 0.0)
        self.sizes: list[int] = []
        self.failing: set[int] = set()
        self.left: int | None = None
        """What is left at the first step, None if the script does not say it."""
        self.made = 0.0
        self.begun: dict[CommandKey, tuple[str, int]] = {}
        """The node that has begun each run of the command, and the number of nodes in it."""
        self.results: dict[str, CommandResult] = {}

    @property
    def state(self) -> AutoscaleState:
        return AutoscaleState.get(self.plan.parts)

    @property
    def has_settled(self) -> bool:
        return self.state.condition.has_settled

    def tick(self) -> None:
        plan = self.plan
        if plan.phase is not PlanPhase.TRAINING:
            return
        if self.began[0] != plan.key:
            self.began = plan.key, self.now
            self.sizes.append(len(plan.members))
        self.made += self.curve[len(plan.members)] * TICK
        if len(plan.members) in self.failing and self.now - self.began[1] > 2 * TICK:
            self.fail_here()
            return
        for rank, name in enumerate(self.ranks):
            if name in self.away:
                continue
            part = AutoscaleAssignment.find(self.assignment(name).parts)
            if part is not None and part.known is not None:
                self.kept[name] = part.known
            found = AutoscaleNodeReport(known=self.kept.get(name), command=self.results.get(name))
            if rank == 0 and part is not None and part.interval:
                trained = self.now - self.began[1]
                steps = int(trained * self.curve[len(plan.members)])
                last = steps / self.curve[len(plan.members)]
                found = replace(found, key=plan.key, steps=steps, seconds=last, age=trained - last)
                if self.left is not None:
                    found = replace(found, left=max(0, int(self.left - self.made)))
            if found != AutoscaleNodeReport():
                self.report(name, parts=(found,))

    @property
    def requested(self) -> list[int]:
        """The numbers of nodes of the runs of the command, in their order."""
        return [nodes for _, nodes in self.begun.values()]

    def take(self, name: str) -> bool:
        """A node begins a run of the command as soon as it receives it."""
        changed = super().take(name)
        part = AutoscaleAssignment.find(self.assignment(name).parts)
        if part is not None and part.command is not None:
            key, ran = part.command.key, (name, part.command.nodes)
            assert self.begun.setdefault(key, ran) == ran, "one node begins each run"
        return changed

    def end_command(self, *, failed: bool = False) -> None:
        """The last run that was begun ends, and its node reports that."""
        key, (name, _) = list(self.begun.items())[-1]
        self.results[name] = CommandResult(key, failed)
        self.report(name, parts=(AutoscaleNodeReport(known=self.kept.get(name), command=self.results[name]),))

    def fail_here(self) -> None:
        """A worker of rank 0 fails."""
        name = self.ranks[0]
        self.report_phase(name, NodePhase.FAILED, Failure(0, name, "raised OutOfMemoryError", node_rank=0), True)

    def take_over(self, epoch: int, with_journal: bool) -> None:
        """Another coordinator takes over, and all nodes connect to it."""
        since = self.now - self.began[1]
        self.succeed_by_another(epoch, with_journal)
        self.began = self.began[0], self.now - since
        self.come_back(*self.statuses)
        self.wait(0.1)


def autoscaled(
    ps: tuple[int, int] = (1, 3), workers: tuple[int, int] = (0, 7), limits: AutoscaleRules = LIMITS, **more: Any
) -> JobRules:
    """Return the rules of a job that chooses within these ranges."""
    cluster = ClusterRules(min_ps=ps[0], max_ps=ps[1], min_workers=workers[0], max_workers=workers[1], **more)
    return JobRules(max_nodes=8, parts=with_part((limits,), cluster))


@dataclass(frozen=True)
class Model:
    """A step takes `alone` seconds of each task that trains, and `served` seconds of a server's processors, of which
    those of the servers together do one after the other. `hot`: all of it is the first server's. The tables have
    `size` percent of the memory of one server. `noise` is the standard deviation of the logarithm of the speed."""

    alone: float = 0.1
    served: float = 0.0
    hot: bool = False
    size: float = 10.0
    noise: float = 0.0

    def steps(self, trainers: int, servers: int) -> float:
        """Return the steps per second."""
        most = (1 if self.hot else servers) / self.served if self.served else 1e9
        return min(trainers / self.alone, most)

    def processor(self, trainers: int, servers: int) -> int:
        used = self.steps(trainers, servers) * self.served / (1 if self.hot else servers)
        return round(100 * used)

    def memory(self, servers: int) -> int:
        return round(self.size / servers)


class ScaledCluster(Scaled, ServersJob):
    """A job on one node with room for all, or on the nodes that the test lets come."""

    def __init__(self, model: Model, rules: JobRules | None = None, here: bool = True, **rooms: int) -> None:
        super().__init__(autoscaled() if rules is None else rules)
        self.model = model
        self.failing: Callable[[int], bool] = lambda workers: False
        self.step = 0.0
        self.history: list[tuple[int, int]] = []
        self._began: tuple[int, float] = (0, 0.0)
        self._random = Random(f"{model}")
        if here:
            self.come("a", **{"workers": 7, "ps": 3, **rooms})

    @property
    def choice(self) -> ReplicaChoice:
        assert self.cluster.choice is not None
        return self.cluster.choice

    @property
    def workers(self) -> AutoscaleState:
        return self.choice.workers

    @property
    def has_settled(self) -> bool:
        return self.workers.condition.has_settled

    @property
    def servers(self) -> ServersChoice:
        return self.choice.servers

    @property
    def numbers(self) -> tuple[int, int]:
        """How many workers and servers there are."""
        return len(self.ids(Role.WORKER)), len(self.ids(Role.PS))

    def tick(self) -> None:
        """What the nodes do and report in one tick."""
        self.obey()
        if self.plan.phase is not PlanPhase.TRAINING:
            return
        self._boot()
        if self.stage is Stage.PAUSING:
            for task in self.ids(Role.WORKER):
                self.end(task, how=LEFT)
        if self.stage is Stage.SAVING:
            self.report_task(self.ids(Role.CHIEF)[0], TaskStage.READY, step=int(self.step), saved=int(self.step))
            self.end(self.ids(Role.CHIEF)[0], how=LEFT)
            self.obey()
            self._boot()
        workers, servers = self.numbers
        if self.failing(workers):
            self.end(self.ids(Role.WORKER)[-1], how=OUT_OF_MEMORY)
            return
        if self.stage in (Stage.TRAINING, Stage.CHANGING):
            if not self.history or self.history[-1] != self.numbers:
                self.history.append(self.numbers)
            self._train(workers + 1, servers)

    def take_over(self, with_journal: bool = True) -> None:
        """Another coordinator takes over, and all nodes report to it."""
        if with_journal:
            self.succeed_coordinator()
            return
        orders = {name: self.order_if_any(name) for name in self.present}
        epoch = self.plan.epoch + 1
        for name, order in orders.items():
            status = self.statuses[name]
            part = tasks_of(status)
            memory = order.remember(None) if order is not None else None
            if part is not None and memory is not None:
                status = msgspec.structs.replace(status, parts=(memory.add_to(part),), known_round=self.plan.key)
            self.statuses[name] = msgspec.structs.replace(status, epoch=self.plan.epoch)
        self.coordinator = Coordinator(self.rules, self.now, epoch + 70_000)
        for name in self.present:
            self.send(name)
        self.wait(7)

    def _boot(self) -> None:
        """Every task that was started becomes ready."""
        for role in (Role.PS, Role.CHIEF, Role.WORKER):
            for name in self.present:
                part = tasks_of(self.statuses[name])
                for task in part.tasks if part is not None else ():
                    if task.key.role is role and task.stage is TaskStage.STARTED:
                        steps = {"restored": int(self.step), "step": int(self.step)} if role is Role.CHIEF else {}
                        self.report_task(str(task.key), TaskStage.READY, **steps)
        self.obey()

    def _train(self, trainers: int, servers: int) -> None:
        noise = math.exp(self._random.gauss(0, self.model.noise)) if self.model.noise else 1.0
        self.step += TICK * self.model.steps(trainers, servers) * noise
        version = self.cluster.version
        if self._began[0] != version:
            self._began = version, self.now
        for name in self.present:
            part = tasks_of(self.statuses[name])
            hosted = {task.role for task in self.cluster.tasks if task.node_id == name}
            pace = load = None
            if Role.CHIEF in hosted and self.step >= 1:
                pace = Pace(version, int(self.step), self.now - self._began[1], 0.0)
            if Role.PS in hosted:
                load = ServerLoad(version, self.model.processor(trainers, servers), self.model.memory(servers))
            if part is not None:
                self._replace(name, pace=pace, load=load)
                self.send(name)
