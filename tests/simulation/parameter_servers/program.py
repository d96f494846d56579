"""A job with parameter servers as the program of a scenario: its rules, its nodes, and its required results."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from support.policy_parts import cluster_of, cluster_rules, order_of

from dlrover_run.coordination.membership import Nodes
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.plan import OVER, Plan
from dlrover_run.coordination.records.requests import Action, OperatorRequest
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.coordination.records.rules import JobRules
from simulation.invariants import Invariants
from simulation.nodes import job_spec
from simulation.parameter_servers.invariants import ClusterInvariants
from simulation.parameter_servers.nodes import FORCED, ServerNode
from simulation.parameter_servers.tensorflow import LEFT, Disk, Process
from simulation.program import Outcome, Program
from simulation.timeline import demand
from tf_ps_runner.cluster.model import (
    Capacity,
    Cluster,
    EndCause,
    Role,
    ScaleRequest,
    TaskEnd,
    TaskKey,
)
from tf_ps_runner.cluster.rules import ClusterRules

if TYPE_CHECKING:
    from simulation.scenario import Scenario

PATIENCE = 900.0
"""Seconds within which a job ends after the last fault: more than the timeouts of all restarts together."""

MAX_NODES = 10

ALL_ROOMS = tuple(Capacity(role, number) for role, number in ((Role.CHIEF, 1), (Role.WORKER, 3), (Role.PS, 3)))

ENDS = (
    FORCED,
    FORCED,
    FORCED,
    LEFT,
    TaskEnd(EndCause.MEMORY, "was killed for its memory"),
    TaskEnd(EndCause.SILENT, "does not answer"),
    TaskEnd(EndCause.SUCCESS, "exited with code 0"),
)


class ServersInvariants(Invariants):
    """Checks what is decided, stored and received. The invariants of the cluster check each plan when it is stored: no
    node receives a plan that a coordinator has decided on and cannot store."""

    kind: type[ClusterInvariants] = ClusterInvariants

    def __init__(self, rules: JobRules, durable: bool, nodes_stay: bool, program: ServersProgram) -> None:
        super().__init__(rules, durable, nodes_stay)
        self.cluster = self.kind(program)
        self.plan = Plan()
        self._program = program
        self._made: dict[int, list[tuple[Plan, Plan, Nodes, frozenset[TaskKey]]]] = {}
        self._lost: set[NodeKey] = set()
        self._connected: set[NodeKey] = set()

    def is_lost(self, node: ServerNode) -> bool:
        """Whether a coordinator has declared this node lost or gone, and it has not reconnected, follows the order of
        another version, or runs a task that is not in the plan any more: no coordinator knows its actions."""
        if node.key not in self._lost:
            return False
        cluster = cluster_of(self.plan) or Cluster()
        named = {task.key for task in (*cluster.tasks, *cluster.next_servers)}
        follows = node.order is None or node.order.version == cluster.version
        if node.key in self._connected and follows and all(one.task.key in named for one in node.processes()):
            self._lost.discard(node.key)
        return node.key in self._lost

    def storing(self, before: Plan | None, after: Plan, now: float) -> None:
        # A coordinator that was replaced before it stored anything may have had the same epoch, so these may be of two.
        made, wanted = self._made.pop(after.epoch, []), after
        place = next((place for place in reversed(range(len(made))) if made[place][1] == after), -1)
        self._made[after.epoch] = made[place + 1 :]
        steps = []
        for step in reversed(made[: place + 1]):
            if step[1] == wanted:
                steps.append(step)
                wanted = step[0]
        for former, following, present, lost in reversed(steps):
            self.cluster.decided(former, following, present, lost)
        self.plan = after

    def sending(self, known: Plan | None, wanted: Assignment) -> None:
        super().sending(known, wanted)
        order = order_of(wanted)
        if order is not None and not order.keep and known is not None:
            cluster = cluster_of(known) or Cluster()
            stored = {task.key for task in (*cluster.tasks, *cluster.next_servers)}
            demand(all(task.key in stored for task in order.tasks), "a task is stored before a node receives it")

    def forgetting(self, all_have_left: bool = False) -> None:
        super().forgetting(all_have_left)
        # A node that joins now begins another job, and knows nothing of the tasks of this job.
        self.cluster = self.kind(self._program)
        self.cluster.was_cut = True
        self._lost |= {node.key for node in self._program.nodes if node.processes()}
        self.plan = Plan()
        self._made.clear()

    def _check_state(self, plan: Plan, after: Plan, present: Nodes, now: float) -> None:
        self._connected = {key for key, p in present.items() if p.connected}
        for key, p in present.items():
            # A node that was asked to leave is not waited for once its connection has ended, though its tasks may run.
            if (p.is_lost(now) or p.has_left) and key not in self._lost:
                self._lost.add(key)
                self.cluster.was_cut |= any(node.key == key and node.alive for node in self._program.nodes)
        if after is plan and not self._made.get(plan.epoch):
            self.cluster.settled(plan, present, now)

    def _check_change(self, plan: Plan, after: Plan, present: Nodes, now: float) -> None:
        super()._check_change(plan, after, present, now)
        self._made.setdefault(after.epoch, []).append((plan, after, dict(present), self.cluster.lost_tasks(plan)))


class ServersProgram(Program):
    """Servers that hold a model, a chief that restores and saves it, and workers that wait at the gate. The job
    succeeds when the model has made `goal` steps."""

    flag = " --parameter-servers"
    always_durable = True

    invariants: ServersInvariants

    def __init__(self, scenario: Scenario, seed: int) -> None:
        super().__init__(scenario, seed)
        self.disk = Disk()
        self.listening: dict[str, Process] = {}
        self._ports = itertools.count(2000)
        self._rooms: dict[str, tuple[Capacity, ...]] = {}

    def rules(self, random: Random) -> JobRules:
        restarts, least = random.randint(1, 6), random.randint(1, 2)
        return JobRules(
            max_nodes=MAX_NODES,
            last_call_timeout=2.0,
            join_timeout=30.0,
            pend_timeout=30.0,
            keep_alive_interval=random.choice((1.0, 3.0)),
            parts=(
                ClusterRules(
                    min_ps=least,
                    max_ps=least if random.random() < 0.3 else 3,
                    min_workers=random.randint(0, 2),
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
            ),
        )

    def make_invariants(self, durable: bool, nodes_stay: bool) -> ServersInvariants:
        self.invariants = ServersInvariants(self.scenario.rules, durable, nodes_stay, self)
        return self.invariants

    def furnish(self) -> None:
        random = self.timeline.random
        self.goal = random.randint(200, 1000)
        self.share_done = random.choice((0, 0, 0.002))
        self.hanging = random.choice((0, 0, 0.02))
        self.crashing = random.choice((0, 0.02, 0.1))

    def slow_stops(self, seconds: float) -> None:
        # An agent kills a task that does not leave within the grace period.
        pass

    def first_nodes(self) -> int:
        return self.timeline.random.randint(1, 6)

    def new_node(self, name: str, number: int, is_return: bool) -> ServerNode:
        if name not in self._rooms:
            self._rooms[name] = self._draw_rooms()
        spec = job_spec(name, f"10.1.0.{number}", 1, "default", None, self.scenario.rules)
        return ServerNode(self, spec, f"{name}.{number}" if is_return else name, f"i{number}", self._rooms[name])

    def faults(self) -> list[Callable[[], None]]:
        return [self._kill_process, self._kill_process, self._kill_servers, self._request, self._swell, self._hang]

    def calm(self) -> None:
        self.hanging = self.crashing = 0

    def replenish(self, staying: set[str]) -> None:
        if self.invariants.over is None and (self.timeline.random.random() < 0.8 or not staying):
            self._rooms["late"] = (*ALL_ROOMS, Capacity(Role.EVALUATOR, 1))
            self.scenario.add_node("late")

    def demand_progress(self) -> None:
        """Not checked separately: the end of the job shows it, because there are too many reasons for a new version."""

    def demand_end(self) -> None:
        over = self.timeline.now + PATIENCE
        self.timeline.run_until(over, lambda: self.invariants.over is not None or not self.living())
        plan = self.invariants.plan
        ended = self.invariants.over is not None or not self.living()
        demand(ended, f"the job does not end: {plan.phase.value}, {plan.reason}")
        self.timeline.run_until(self.timeline.now + PATIENCE, lambda: not self.living())
        names = ", ".join(node.name for node in self.living())
        demand(not names, f"the job is over, and {names} was not notified")
        left = [process.task.key for node in self.nodes for process in node.processes()]
        demand(not left, f"{left and left[0]} is still running when its agent has ended")

    def outcome(self) -> Outcome:
        over = self.invariants.over
        cluster = cluster_of(over if over is not None else self.invariants.plan) or Cluster()
        return Outcome(
            over.phase.value if over is not None and over.phase in OVER else "",
            self.scenario.coordinators,
            self.timeline.now,
            restarts=sum(state.failures + state.memory_restarts for state in cluster.roles),
            versions=cluster.version,
            planned=len(self.invariants.cluster.spared),
        )

    @property
    def nodes(self) -> list[ServerNode]:
        return [node for node in self.scenario.nodes if isinstance(node, ServerNode)]

    @property
    def limits(self) -> ClusterRules:
        return cluster_rules(self.scenario.rules)

    @property
    def cluster_invariants(self) -> ClusterInvariants:
        return self.invariants.cluster

    def living(self) -> list[ServerNode]:
        return [node for node in self.nodes if node.alive and not node.left]

    def fresh_port(self) -> int:
        return next(self._ports)

    def _draw_rooms(self) -> tuple[Capacity, ...]:
        random = self.timeline.random
        if random.random() < 0.4:
            drawn = (*ALL_ROOMS, Capacity(Role.EVALUATOR, 1))
        else:
            drawn = tuple(Capacity(role, random.randint(1, 2)) for role in Role if random.random() < 0.5)
        # Of the first nodes only those that ask for an evaluator have room for one. A late node asks for it in any job.
        return tuple(room for room in drawn if room.role is not Role.EVALUATOR or self.limits.evaluator)

    def _processes(self, *roles: Role) -> list[Process]:
        return [p for node in self.living() for p in node.processes() if not roles or p.task.role in roles]

    def _kill_process(self) -> None:
        processes = self._processes()
        if processes:
            process, how = self.timeline.random.choice(processes), self.timeline.random.choice(ENDS)
            if how.cause is not EndCause.SUCCESS or process.task.role is not Role.CHIEF:
                process.end(how)

    def _kill_servers(self) -> None:
        for process in self._processes(Role.PS):
            process.end(FORCED)

    def _request(self) -> None:
        """An operator requests other numbers of servers and workers on the machine of a node."""
        living = self.living()
        if living:
            random = self.timeline.random
            node, numbers = random.choice(living), [None, *range(5)]
            size = ScaleRequest(random.choice(numbers), random.choice(numbers))
            node.request(OperatorRequest(Action.SCALE, by=node.key.node_id, part=size))

    def _swell(self) -> None:
        for process in self._processes(Role.PS):
            if self.timeline.random.random() < 0.5:
                process.near_memory_limit = True
                process.node.publish()

    def _hang(self) -> None:
        """Hang a process. The agent detects it for a server; other processes only block each other."""
        servers = self._processes(Role.PS)
        if servers:
            process = self.timeline.random.choice(servers)
            process.hangs = True
            silent = TaskEnd(EndCause.SILENT, "does not answer")
            self.timeline.after(self.timeline.random.uniform(2, 6), lambda: process.end(silent))
