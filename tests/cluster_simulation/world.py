"""One run: a coordinator that stores its plan before it tells anybody, nodes that come and go, and what happens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from policy_parts import cluster_of, cluster_rules
from simulation.parameter_servers.laws import ClusterLaws
from simulation.parameter_servers.tensorflow import Disk, Process
from simulation.timeline import Broken, Timeline, demand

from cluster_simulation.network import Network
from cluster_simulation.nodes import Node
from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.model import OVER, NodeReport, Plan
from dlrover_run.coordination.rules import JobRules
from dlrover_run.policies.parameter_servers.model import Capacity, Cluster, Role
from dlrover_run.policies.parameter_servers.policy import ParameterServerPolicy
from dlrover_run.policies.parameter_servers.rules import ClusterRules

TROUBLE = 60.0
"""Seconds in which there are faults. After that a job has to come to its end."""

PATIENCE = 900.0
"""Seconds within which it has to: more than the time-outs of all restarts together."""


@dataclass(frozen=True)
class Outcome:
    """What a run has come to."""

    phase: str
    versions: int
    planned: int
    charged: int
    reason: str


class World:
    """All that there is in one run."""

    def __init__(self, seed: int, tell: Callable[[str], None] | None) -> None:
        self.seed = seed
        self.timeline = Timeline(seed, tell)
        random = self.timeline.random
        self.rules = _rules(random.random() < 0.3, random.randint(1, 2), random.randint(0, 2), random.randint(1, 6))
        self.network = Network(self)
        self.laws = ClusterLaws(self)
        self.disk = Disk()
        self.listening: dict[str, Process] = {}
        self.nodes: list[Node] = []
        self.coordinator: Coordinator | None = None
        self.master = 0
        self.stored: Plan | None = None
        self.goal = random.randint(200, 600)
        self.share_done = random.choice((0, 0, 0.002))
        self.hanging = random.choice((0, 0, 0.02))
        self.crashing = random.choice((0, 0.02, 0.1))
        self.troubled = True
        self._ports = itertools.count(2000)
        self._incarnations = itertools.count(1)
        self._told: dict[Node, object] = {}
        self._woken: float | None = None

    @property
    def limits(self) -> ClusterRules:
        return cluster_rules(self.rules)

    @property
    def cluster_laws(self) -> ClusterLaws:
        return self.laws

    def fresh_port(self) -> int:
        return next(self._ports)

    @property
    def plan(self) -> Plan:
        """The plan that was stored last."""
        return self.stored or Plan()

    @property
    def cluster(self) -> Cluster:
        return cluster_of(self.plan) or Cluster()

    def start_coordinator(self) -> None:
        if self.coordinator is None:
            self.master += 1
            self.timeline.note("master", f"begins as {self.master}")
            self.coordinator = Coordinator(self.rules, self.timeline.now, self.master, self.stored)
            self._woken = None
            self.settle()

    def crash_coordinator(self) -> None:
        if self.coordinator is None:
            return
        self.timeline.note("master", "is killed")
        self.coordinator = None
        for node in list(self.network.links):
            self.network.broke(node)
        self.timeline.after(self.timeline.random.uniform(0.01, 4), self.start_coordinator)

    def add_node(self, name: str, rooms: tuple[Capacity, ...]) -> Node:
        node = Node(self, name, next(self._incarnations), rooms)
        self.nodes.append(node)
        node.note("begins")
        self.network.connect(node)
        return node

    def living(self) -> list[Node]:
        return [node for node in self.nodes if node.alive]

    def hear(self, status: NodeReport) -> None:
        if self.coordinator is not None and self.coordinator.refusal(status.key) is None:
            self.coordinator.receive(status, self.timeline.now)
            self.settle()

    def lose(self, node: Node) -> None:
        if self.coordinator is not None:
            self.coordinator.disconnect(node.key, self.timeline.now)
            self.settle()

    def settle(self) -> None:
        """Decide until nothing changes; store each plan, then tell it."""
        coordinator = self.coordinator
        if coordinator is None:
            return
        for _ in range(20):
            before = self.plan
            if not coordinator.advance(self.timeline.now):
                break
            if self.troubled and self.timeline.random.random() < 0.002:
                # Killed before the plan was stored: nobody ever hears of it.
                self.crash_coordinator()
                return
            self.laws.decided(before, coordinator.plan, coordinator.members)
            self.stored = coordinator.plan
            if before.reason != self.stored.reason or before.phase != self.stored.phase:
                cluster = self.cluster
                self.timeline.note("plan", f"{cluster.version} {cluster.stage.value}: {self.stored.reason}")
            if self.troubled and self.timeline.random.random() < 0.002:
                self.crash_coordinator()
                return
        else:
            raise Broken("deciding never comes to rest")
        now = coordinator._job_time(self.timeline.now)
        again = ParameterServerPolicy(self.rules).decide(coordinator.plan, coordinator.members, now)
        demand(again.plan is coordinator.plan, f"deciding again gives another plan: {again.plan.reason}")
        self.laws.settled(coordinator.plan, coordinator.members, coordinator._job_time(self.timeline.now))
        self._tell(coordinator)
        self._wake(coordinator)

    def run(self, until: float, done: Callable[[], bool]) -> None:
        try:
            self.timeline.run_until(until, done)
        except Broken as broken:
            raise Broken(f"seed {self.seed}, at {self.timeline.now:.3f} s: {broken}") from None

    def _tell(self, coordinator: Coordinator) -> None:
        for node, link in self.network.links.items():
            if link.master != self.master or (
                node.key not in coordinator.members and coordinator.plan.phase not in OVER
            ):
                continue
            told = coordinator.assignment(node.key)
            if self._told.get(node) != (link.down == 0.0, told):
                self._told[node] = (False, told)
                self.network.tell(node, told)

    def _wake(self, coordinator: Coordinator) -> None:
        wake_at = coordinator.wake_at()
        if wake_at is None or (self._woken is not None and self.timeline.now < self._woken <= wake_at):
            return
        self._woken = wake_at

        def wake() -> None:
            if self.coordinator is coordinator:
                self._woken = None
                self.settle()

        self.timeline.at(max(wake_at, self.timeline.now), wake)


def _rules(fixed: bool, min_ps: int, min_workers: int, restarts: int) -> JobRules:
    return JobRules(
        max_nodes=20,
        last_call_timeout=2.0,
        join_timeout=30.0,
        pend_timeout=30.0,
        policy=ClusterRules(
            min_ps=min_ps,
            max_ps=min_ps if fixed else 3,
            min_workers=min_workers,
            max_workers=3,
            evaluator=restarts % 2,
            max_restarts=restarts,
            ps_memory=100 * (restarts % 3),
            worker_memory=100 * (restarts % 2),
            max_memory=300 * (restarts % 2),
            save_timeout=5.0,
            ready_timeout=15.0,
            end_grace=4.0,
        ),
    )


ALL_ROOMS = tuple(Capacity(role, number) for role, number in ((Role.CHIEF, 1), (Role.WORKER, 3), (Role.PS, 3)))
