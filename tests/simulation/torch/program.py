"""A torch job as the program of a scenario: its rules, its nodes, and its required results."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from msgspec.structs import replace
from support.policy_parts import check_rules

from dlrover_run.coordination.coordinator import RETURN_GRACE
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.node_check.decision.diagnosis import MIN_WITNESSES
from dlrover_run.features.node_check.decision.pairing import MAX_ROUNDS
from dlrover_run.features.node_check.decision.round import CHECK_MARGIN
from dlrover_run.features.node_check.rules import NodeCheckRules
from simulation.nodes import job_spec
from simulation.program import Outcome, Program
from simulation.timeline import demand
from simulation.torch.checks import CHECK_TIMEOUT, health_of
from simulation.torch.invariants import TorchInvariants
from simulation.torch.nodes import TorchNode
from simulation.torch.operator import Operator
from simulation.torch.preparation import Preparation
from simulation.torch.racks import Rack
from simulation.torch.workers import Workers

if TYPE_CHECKING:
    from simulation.scenario import Scenario

HUNG = 30.0
"""Seconds after which workers that wait for a missing peer fail by themselves."""

SHARE_OF_SAVING_RUNS = 0.15
"""In how many runs the workers mark checkpoints."""

SHARE_OF_SHORT_CUT_OFFS = 0.3
"""The share of runs in which a node that is cut off ends while the network may still be cut."""


def random_rules(random: Random) -> JobRules:
    """Draw the rules of a job of at most six nodes."""
    unit = random.choice((1, 1, 1, 2, 3))
    most = random.randint(unit, 6)
    least = random.randint(1, max(1, most // unit * unit))
    return JobRules(
        min_nodes=least,
        max_nodes=most,
        node_unit=unit,
        spares=random.randint(0, 2),
        max_restarts=random.randint(0, 6),
        restart_window=random.choice((0.0, 0.0, 30.0, 120.0)),
        early_failure_limit=random.choice((0, 5)),
        last_call_timeout=random.choice((1.0, 5.0, 30.0)),
        join_timeout=random.choice((60.0, 600.0)),
        pend_timeout=random.choice((20.0, 60.0, 600.0)),
        scale_up_delay=random.choice((0.0, 0.0, 3.0)),
        keep_alive_interval=random.choice((1.0, 3.0)),
        store=("10.0.0.1", 29500) if random.random() < 0.1 else None,
    )


class TorchProgram(Program):
    """Workers of one round at a time, in some runs after a node check. `slow_stop` and `slow_start` are the seconds
    that workers take at most."""

    invariants: TorchInvariants
    nodes_prepare = False
    """Whether nodes import what their workers need before they take part."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        super().__init__(scenario, seed)
        self._seed = seed
        self.health = health_of(seed)
        self._saving = Random(f"marks {seed}")
        self._marks_every = 0.0
        self._operator = Operator(scenario, seed)
        self.rack = Rack(scenario, seed)
        self.preparation = Preparation(scenario, seed, self.nodes_prepare)

    def rules(self, random: Random) -> JobRules:
        rules = replace(
            random_rules(random),
            parts=(
                NodeCheckRules(
                    check=self.health.mode, check_timeout=CHECK_TIMEOUT, exclude_stragglers=self.health.exclude
                ),
            ),
        )
        # From a generator of its own: the runs of seeds without it stay the same.
        short = Random(f"cut off {self._seed}")
        if short.random() < SHARE_OF_SHORT_CUT_OFFS:
            rules = replace(rules, cut_off_timeout=short.choice((2.0, 5.0, 15.0)))
        if self._saving.random() < SHARE_OF_SAVING_RUNS:
            self._marks_every = self._saving.choice((0.5, 5.0, 20.0))
            rules = replace(rules, scale_wait=self._saving.choice((0.0, 3.0, 10.0)))
        return self.preparation.rules(rules)

    def make_invariants(self, durable: bool, nodes_stay: bool) -> TorchInvariants:
        self.invariants = TorchInvariants(self.scenario.rules, durable, nodes_stay, self.health)
        return self.invariants

    def furnish(self) -> None:
        random = self.timeline.random
        self.workers = Workers(self.timeline, work=random.uniform(3, 60), patience=HUNG)
        self.workers.late = self.preparation.longest
        self.workers.marks_every = self._marks_every
        self.invariants.marks = self.workers.marks
        self.invariants.newcomers.clock = lambda: self.timeline.now
        self.workers.fixed_store = self.scenario.rules.store is not None
        self.slow_stop = random.choice((0.1, 2.0, 15.0))
        self.slow_start = random.choice((0.1, 3.0))

    def begin(self, until: float) -> None:
        self._operator.begin(until)
        self.rack.begin(until)

    def slow_stops(self, seconds: float) -> None:
        self.slow_stop = seconds
        # Their peers wait for that.
        self.workers.patience += seconds

    def first_nodes(self) -> int:
        return self.timeline.random.randint(1, self.scenario.rules.max_nodes + 2)

    def new_node(self, name: str, number: int, is_return: bool) -> TorchNode:
        random, rules = self.timeline.random, self.scenario.rules
        node_rank = random.randint(0, rules.max_nodes) if random.random() < 0.2 else None
        role = random.choice(("default", "default", "reader"))
        spec = job_spec(name, f"10.1.0.{number}", random.randint(1, 4), role, node_rank, rules)
        self.health.plant(NodeKey(name, f"i{number}"), f"10.1.0.{number}")
        return TorchNode(self, spec, f"{name}.{number}" if is_return else name, f"i{number}")

    def faults(self) -> list[Callable[[], None]]:
        return [self._fail_worker, self._kill_worker]

    def calm(self) -> None:
        self.health.over = True

    def replenish(self, staying: set[str]) -> None:
        staying -= {key.node_id for key in self.health.planted}
        if (plan := self.scenario.plan) is not None:
            staying -= {key.node_id for key in (*plan.draining, *plan.to_drain)}
        if not self.scenario.is_short and self.invariants.over is None:
            for _ in range(self.scenario.rules.min_size - len(staying)):
                self.scenario.add_node()

    def demand_progress(self) -> None:
        """Demand that within a bounded time a round has formed, and all its members train in it, or the job is over."""
        rules = self.scenario.rules
        known = 2 * rules.heartbeat_timeout + rules.lost_after + RETURN_GRACE + self.workers.patience
        formed = rules.last_call_timeout + rules.scale_up_delay + 2 * (self.slow_stop + self.slow_start)
        bound = self.timeline.now + known + formed + 2 * HUNG + 2 * self.preparation.longest
        if check_rules(rules).check:
            bound += (MAX_ROUNDS + MIN_WITNESSES + 2) * (check_rules(rules).check_timeout + CHECK_MARGIN)
        if self.scenario.is_short:
            bound += rules.join_timeout + rules.pend_timeout
        self.timeline.run_until(bound, lambda: self._is_settled)
        demand(self._is_settled, "with enough running nodes a round forms, and trains")

    @property
    def _is_settled(self) -> bool:
        return self.invariants.over is not None or not self._living or self._trains()

    def _trains(self) -> bool:
        plan = self.scenario.plan
        if plan is None or not self.workers.completed:
            return False
        members = [node for node in self._living if node.works and plan.key == node.ranked_in]
        return self.workers.completed[-1] == plan.key and len(members) == len(plan.members)

    def demand_end(self) -> None:
        """Demand that the job ends, with success or not, and that all nodes of the job are notified."""
        rules = self.scenario.rules
        bound = self.timeline.now + 3 * self.workers.start_patience + 600 + rules.join_timeout + rules.pend_timeout
        self.timeline.run_until(bound, lambda: not self._living)
        names = ", ".join(node.name for node in self._living)
        demand(not self._living, f"a job without faults ends, and {names} is notified")
        blamed = self.invariants.blamed - self.workers.failed
        gentle = self.scenario.trouble == "gentle"
        demand(not gentle or not blamed, f"a change of membership costs no restart, but {blamed} did")

    def outcome(self) -> Outcome:
        invariants, over = self.invariants, self.invariants.over
        return Outcome(
            over.phase.value if over else "",
            self.scenario.coordinators,
            self.timeline.now,
            restarts=invariants.restarts,
            rounds=invariants.rounds,
            completed=len(self.workers.completed),
            checks=invariants.checks,
            dismissed=len(invariants.dismissed),
        )

    @property
    def _living(self) -> list[TorchNode]:
        return [node for node in self.scenario.living if isinstance(node, TorchNode)]

    def _any_node(self) -> TorchNode | None:
        node = self.scenario.any_node()
        return node if isinstance(node, TorchNode) else None

    def _fail_worker(self) -> None:
        node = self._any_node()
        if node is not None and node.group is not None:
            node.group.fail()

    def _kill_worker(self) -> None:
        node = self._any_node()
        if node is not None and node.group is not None:
            node.group.fail(killed=True)


class PreparingProgram(TorchProgram):
    """The same jobs, whose nodes prepare."""

    flag = " --preparing"
    nodes_prepare = True
