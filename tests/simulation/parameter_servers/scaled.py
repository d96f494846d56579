"""Jobs with parameter servers that choose their own numbers of workers and servers: the nodes report steps and load by
the product's own `PaceReport`, each by a clock of its own."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec.structs import replace
from support.policy_parts import cluster_of

from dlrover_run.coordination.membership import Nodes
from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.plan import Plan
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.requests import Action, OperatorRequest
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.autoscale.rules import STRONG, AutoscaleRules
from dlrover_run.features.autoscale.search import MAX_CRASHES
from simulation.nodes import job_spec
from simulation.parameter_servers.invariants import ClusterInvariants
from simulation.parameter_servers.nodes import ServerNode
from simulation.parameter_servers.program import ServersInvariants, ServersProgram
from simulation.timeline import demand
from tf_ps_runner.agent.pace import PaceReport, SeenTask
from tf_ps_runner.cluster.choice import ReplicaChoice
from tf_ps_runner.cluster.model import Cluster, Role, ScaleRequest, Stage, TaskKey
from tf_ps_runner.cluster.orders import NodeOrder
from tf_ps_runner.cluster.reports import NodeTasks
from tf_ps_runner.cluster.size_text import ServersCode

if TYPE_CHECKING:
    from simulation.scenario import Scenario


CHANGES = (Stage.CHANGING, Stage.PAUSING, Stage.SAVING)


class ScaledClusterInvariants(ClusterInvariants):
    """The invariants of every job with parameter servers, and those of its choice: it stays within the bounds, changes
    one thing at a time, takes no server away, and excuses a few failures only."""

    world: ScaledServersProgram

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.excused: dict[int, int] = {}

    def excuses(self, former: Cluster, cluster: Cluster, role: Role) -> bool:
        failed = [one.choice.workers.failed_round for one in (former, cluster) if one.choice is not None]
        return role is Role.WORKER and len(set(failed)) > 1

    def decided(self, before: Plan, plan: Plan, present: Nodes, lost: frozenset[TaskKey]) -> None:
        super().decided(before, plan, present, lost)
        cluster, former = cluster_of(plan), cluster_of(before)
        if cluster is None or former is None or cluster.choice is None or former.choice is None:
            return
        self._look_at_choice(former.choice, cluster.choice)
        if former.stage in CHANGES and cluster.stage in CHANGES and former.version == cluster.version:
            workers = cluster.choice.workers
            # The first size that is wanted is the one that the job has, once its first measurement is complete.
            has = workers.measurement.size if former.choice.workers.target == 0 and workers.measurement else 0
            same = workers.target in (former.choice.workers.target, has)
            demand(same, "other workers are wanted while the servers change")
        bounds = cluster.server_bounds
        added = cluster.choice.servers.target > max(1, former.choice.servers.target)
        demand(
            not added or bounds is None or cluster.choice.servers.target <= bounds.most or former.server_bounds is None,
            "more servers are wanted than the tables allow",
        )

    def _look_at_choice(self, former: ReplicaChoice, choice: ReplicaChoice) -> None:
        limits = self.world.limits
        workers, servers = choice.workers.target, choice.servers.target
        fits = not workers or limits.min_workers < workers <= limits.max_workers + 1
        demand(fits, f"{workers - 1} workers are wanted, which the job may not have")
        demand(servers <= limits.max_ps, f"{servers} servers are wanted, which the job may not have")
        if workers or servers:
            self.world.chosen.add((workers, servers))
        if servers < former.servers.target:
            demand(ServersCode.FAILED.within(choice.servers.reasons), "a server is taken away")
        added = servers > former.servers.target > 0 and _is_news(choice)
        changed = workers != former.workers.target
        demand(not (added and changed), "workers and servers change at the same time")
        if choice.workers.failed_round != former.workers.failed_round:
            size = former.workers.target
            known = any(one.size == size and one.blocks for one in former.workers.table)
            demand(not known, "workers that fail at a known size are charged")
            self.excused[size] = self.excused.get(size, 0) + 1
            demand(self.excused[size] <= MAX_CRASHES, f"workers may fail {self.excused[size]} times at one size")


def _is_news(choice: ReplicaChoice) -> bool:
    return any(code.within(choice.servers.reasons) for code in (ServersCode.PROCESSOR, ServersCode.MEMORY))


class ScaledServersInvariants(ServersInvariants):
    kind = ScaledClusterInvariants


def _fail_the_run(error: Exception) -> NoReturn:
    raise error


class ScaledServerNode(ServerNode):
    """An agent that reports the steps of the job and the load of its servers."""

    _pace: PaceReport | None = None

    def _now(self) -> int:
        return Random(f"clock {self.key}").randint(0, 10**15) + int(self.timeline.now * 1e9)

    def _follow(self) -> None:
        if self._pace is None:
            world = self.world
            assert isinstance(world, ScaledServersProgram)
            self._steps: dict[TaskKey, tuple[int, int]] = {}
            self._pace = PaceReport(
                self._seen,
                lambda: self.run(self.publish),
                _fail_the_run,
                self._now,
                processors=lambda: 1.0,
                memory=lambda: 100,
                cpu=lambda pid: world.used(),
            )
        super()._follow()
        ends = self.left or self._ends
        self._pace.follow(self.order or NodeOrder(version=0), ends)

    def _status(self, phase: NodePhase) -> NodeReport:
        report = super()._status(phase)
        tasks = NodeTasks.get(report.parts)
        return report if self._pace is None else replace(report, parts=(self._pace.add_to(tasks),))

    def _seen(self) -> Iterable[SeenTask]:
        world = self.world
        assert isinstance(world, ScaledServersProgram)
        for number, process in enumerate(self.processes()):
            key = process.task.key
            if process.step >= 0 and self._steps.get(key, (-1, 0))[0] != process.step:
                self._steps[key] = process.step, self._now()
            at = self._steps[key][1] if key in self._steps else None
            version = process.task.version
            yield SeenTask(key.role, version, number, process.step, at, lambda: world.memory, 100)

    def _close(self) -> None:
        if self._pace is not None:
            self._pace.close()
        super()._close()


class ScaledServersProgram(ServersProgram):
    """The same jobs, which choose their numbers in seconds. The load of the servers comes and goes."""

    flag = " --scaled-servers"

    invariants: ScaledServersInvariants

    def __init__(self, scenario: Scenario, seed: int) -> None:
        super().__init__(scenario, seed)
        self.chosen: set[tuple[int, int]] = set()
        self._seed = seed

    def rules(self, random: Random) -> JobRules:
        rules = super().rules(random)
        limits = AutoscaleRules(scaling=STRONG, block=0.5, warm_up=0.5, tolerance=0.1, node_timeout=5.0, retry=60.0)
        return replace(rules, parts=with_part(rules.parts, limits))

    def make_invariants(self, durable: bool, nodes_stay: bool) -> ScaledServersInvariants:
        self.invariants = ScaledServersInvariants(self.scenario.rules, durable, nodes_stay, self)
        return self.invariants

    def furnish(self) -> None:
        super().furnish()
        drawn = Random(f"load {self._seed}")
        self._busy_from, self._busy = drawn.uniform(0, 60), drawn.choice((0.2, 0.95, 0.95))
        self.memory = drawn.choice((10, 10, 95))

    def used(self) -> float:
        """Return the seconds of processors that a server has used."""
        now = self.timeline.now
        return 0.3 * min(now, self._busy_from) + self._busy * max(0.0, now - self._busy_from)

    def new_node(self, name: str, number: int, is_return: bool) -> ScaledServerNode:
        if name not in self._rooms:
            self._rooms[name] = self._draw_rooms()
        spec = job_spec(name, f"10.1.0.{number}", 1, "default", None, self.scenario.rules)
        return ScaledServerNode(self, spec, f"{name}.{number}" if is_return else name, f"i{number}", self._rooms[name])

    def _request(self) -> None:
        living, random = self.living(), self.timeline.random
        if living and random.random() < 0.5:
            node, roles = random.choice(living), random.choice(((Role.PS,), (Role.WORKER,), (Role.PS, Role.WORKER)))
            node.request(OperatorRequest(Action.SCALE, by=node.key.node_id, part=ScaleRequest(auto=roles)))
            return
        super()._request()
