"""One run: a job of random rules on random nodes, its faults, and what has to come of it once they are over."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any
from unittest.mock import patch

from policy_parts import check_rules

from dlrover_run.coordination.coordinator import RETURN_GRACE
from dlrover_run.coordination.model import NodeKey, Plan
from dlrover_run.coordination.rules import JobRules
from dlrover_run.policies.health.diagnosis import MIN_WITNESSES
from dlrover_run.policies.health.pairing import MAX_ROUNDS
from dlrover_run.policies.health.round import CHECK_MARGIN
from dlrover_run.policies.health.rules import HealthRules
from dlrover_run.spec import JobSpec
from simulation.checks import CHECK_TIMEOUT, health_of
from simulation.disk import Disk
from simulation.faults import Faults, MasterFaults
from simulation.laws import Laws
from simulation.master_client import ClientOfMaster
from simulation.masters import Masters
from simulation.network import TO_MASTER, TO_NODE, Weather
from simulation.nodes import Node, NodeClient, Place, job_spec
from simulation.timeline import Broken, Timeline, demand
from simulation.workers import Workers

HUNG = 30.0
"""Seconds after which workers that wait for a peer in vain give up by themselves."""

TROUBLES = ("gentle", "nodes", "network", "place", "all", "all")
"""What a run has trouble with, besides its workers. In a gentle one nobody is silent, so everything is known within a
second, and so is what each failure came from."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to, for those who want to know that the runs are worth something."""

    rounds: int
    restarts: int
    completed: int
    phase: str
    coordinators: int
    ended_at: float
    checks: int
    dismissed: int


SHARE_OF_SHORT_CUT_OFFS = 0.3
"""In how many runs a node that is cut off ends while the network may still be cut."""


def random_rules(random: Random) -> JobRules:
    """The rules of a job of at most six nodes."""
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


class Scenario(ABC):
    """One seed's run, wherever the records of its job live. `tell` gets the lines of a trace."""

    faults: Faults
    laws: Laws
    place: Place
    trouble: str
    workers: Workers
    calm_at: float
    is_short: bool

    flag = ""

    def __init__(self, seed: int, tell: Callable[[str], None] | None = None) -> None:
        self.timeline = Timeline(seed, tell)
        self.health = health_of(seed)
        self.rules = replace(
            random_rules(self.timeline.random),
            policy=HealthRules(
                check=self.health.mode, check_timeout=CHECK_TIMEOUT, exclude_stragglers=self.health.exclude
            ),
        )
        # Of a generator of its own: the runs of seeds without it stay as they are.
        short = Random(f"cut off {seed}")
        if short.random() < SHARE_OF_SHORT_CUT_OFFS:
            self.rules = replace(self.rules, cut_off_timeout=short.choice((2.0, 5.0, 15.0)))
        self.nodes: list[Node] = []
        self._hosts = 0

    @property
    @abstractmethod
    def plan(self) -> Plan | None:
        """The plan that holds."""

    @property
    @abstractmethod
    def coordinators(self) -> int:
        """How many have coordinated the job."""

    @abstractmethod
    def _open_client(self, node: Node, spec: JobSpec, on_change: Callable[[], None]) -> NodeClient:
        """A node's end."""

    @abstractmethod
    def _keep_up(self) -> None:
        """Have whatever is needed besides nodes."""

    @abstractmethod
    def _settle(self) -> None:
        """All faults of the place of the records are over."""

    def _may_stay(self, node: Node) -> bool:
        """Whether nothing keeps a living node out of the job."""
        return True

    def _furnish(self, weather: Weather) -> None:
        """Choose what a node finds around it."""
        random = self.timeline.random
        self.workers = Workers(self.timeline, work=random.uniform(3, 60), patience=HUNG)
        self.workers.fixed_store = self.rules.store is not None
        self.place = Place(
            self.timeline,
            self._open_client,
            self.workers,
            self.laws,
            slow_stop=random.choice((0.1, 2.0, 15.0)),
            slow_start=random.choice((0.1, 3.0)),
            weather=weather,
            health=self.health,
            answers=self._answers,
        )
        self.laws.health = self.health
        self.laws.calm = self.trouble == "gentle"
        self.calm_at = random.uniform(30, 200)
        self.is_short = random.random() < 0.1

    def _answers(self, node: Node, address: str) -> bool:
        """Whether the machine at that address answers a node: its kernel does, whatever its processes do."""
        machine = next(other for other in self.nodes if other.address == address)
        ways = [(each.link, way) for each in (node, machine) for way in (TO_MASTER, TO_NODE)]
        return not machine.machine_lost and all(link.free(way) for link, way in ways)

    def _describe(self, kept: str) -> None:
        self.timeline.note("job", f"{self.rules}")
        self.timeline.note("job", f"trouble with {self.trouble}, {kept}, calm at {self.calm_at:.1f}")

    def add_node(self, node_id: str | None = None) -> Node:
        """A process begins to be a node: a new one, or another process under an id that there has been."""
        random = self.timeline.random
        self._hosts += 1
        name = node_id or f"n{self._hosts}"
        wish = random.randint(0, self.rules.max_nodes) if random.random() < 0.2 else None
        role = random.choice(("default", "default", "reader"))
        spec = job_spec(name, f"10.1.0.{self._hosts}", random.randint(1, 4), role, wish, self.rules)
        self.health.plant(NodeKey(name, f"i{self._hosts}"), f"10.1.0.{self._hosts}")
        node = Node(self.place, spec, f"{name}.{self._hosts}" if node_id else name, f"i{self._hosts}")
        self.nodes.append(node)
        return node

    @property
    def living(self) -> list[Node]:
        """Nodes that take part, or would like to."""
        return [node for node in self.nodes if node.alive and not node.left]

    def run(self) -> Outcome:
        """Let it happen. Raises Broken with the law that did not hold."""
        self._begin()
        self.timeline.run_until(self.calm_at, lambda: self.laws.over is not None)
        self._calm()
        self._demand_round()
        self._demand_end()
        blamed = self.laws.blamed - self.workers.failed
        demand(self.trouble != "gentle" or not blamed, f"a change of membership costs nothing, but {blamed} did")
        self._demand_rest()
        over = self.laws.over
        return Outcome(
            self.laws.rounds,
            self.laws.restarts,
            len(self.workers.completed),
            over.phase.value if over else "",
            self.coordinators,
            self.timeline.now,
            self.laws.checks,
            len(self.laws.dismissed),
        )

    def _begin(self) -> None:
        random = self.timeline.random
        for _ in range(random.randint(1, self.rules.max_nodes + 2)):
            self.timeline.after(random.uniform(0, random.choice((0.1, 10.0))), self.add_node)
        self._keep_up()
        self.faults.begin(self.calm_at)

    def _calm(self) -> None:
        """No fault happens any more, and what was stopped or cut off comes back."""
        self.timeline.note("job", "all faults are over")
        self.faults.over = self.health.over = True
        self.place.weather.slowness = 0.01
        self._settle()
        for node in self.nodes:
            node.link.heal()
            node.resume()
        staying = {
            node.key.node_id
            for node in self.living
            if not (node.is_leaving or node.rendezvous.may_give_up) and self._may_stay(node)
        }
        staying -= {key.node_id for key in self.health.planted}
        if not self.is_short and self.laws.over is None:
            for _ in range(self.rules.min_size - len(staying)):
                self.add_node()

    def _demand_round(self) -> None:
        """Within a bounded time a round has formed and all its members train in it, or the job is over."""
        rules, place = self.rules, self.place
        known = 2 * rules.heartbeat_timeout + rules.lost_after + RETURN_GRACE + self.workers.patience
        formed = rules.last_call_timeout + rules.scale_up_delay + 2 * (place.slow_stop + place.slow_start)
        bound = self.timeline.now + known + formed + 2 * HUNG
        if check_rules(rules).check:
            bound += (MAX_ROUNDS + MIN_WITNESSES + 2) * (check_rules(rules).check_timeout + CHECK_MARGIN)
        if self.is_short:
            bound += rules.join_timeout + rules.pend_timeout
        self.timeline.run_until(bound, lambda: self._is_settled)
        demand(self._is_settled, "with enough living nodes a round forms, and trains")

    @property
    def _is_settled(self) -> bool:
        return self.laws.over is not None or not self.living or self._trains()

    def _trains(self) -> bool:
        plan = self.plan
        if plan is None or not self.workers.completed:
            return False
        members = [node for node in self.living if node.works and plan.key == node.seated_in]
        return self.workers.completed[-1] == plan.key and len(members) == len(plan.members)

    def _demand_end(self) -> None:
        """The job ends, well or not, and all who took part in it learn of that."""
        bound = self.timeline.now + 3 * self.workers.patience + 600 + self.rules.join_timeout + self.rules.pend_timeout
        self.timeline.run_until(bound, lambda: not self.living)
        names = ", ".join(node.name for node in self.living)
        demand(not self.living, f"a job that nothing disturbs comes to its end, and {names} learns of that")

    @abstractmethod
    def _demand_rest(self) -> None:
        """What else has to hold when everybody is gone."""

    def close(self) -> None:
        """Let go of all processes."""
        for node in self.nodes:
            node.dispose()


class MasterScenario(Scenario):
    """The records live in a master."""

    def __init__(self, seed: int, tell: Callable[[str], None] | None = None) -> None:
        super().__init__(seed, tell)
        random = self.timeline.random
        self.durable = random.random() < 0.6
        self.trouble = random.choice(TROUBLES)
        self.two_places = random.random() < 0.3
        slowness = 0.3 if self.trouble == "gentle" else random.choice((0.01, 0.3, 2.0))
        weather = Weather(slowness, echo=random.choice((0.0, 0.1, 0.6)))
        nodes_stay = self.trouble == "place" and not self.two_places and weather.slowness < 1
        self.laws = Laws(self.rules, self.durable, nodes_stay)
        disk = Disk(self.laws, self.timeline) if self.durable else None
        self.masters = Masters(self.timeline, self.laws, disk, self.two_places, random.random() < 0.2)
        self._furnish(weather)
        self.faults = MasterFaults(self, disk)
        places = "two places" if self.two_places else "one place"
        self._describe(f"{'a journal' if self.durable else 'no journal'}, {places}")

    @property
    def plan(self) -> Plan | None:
        job = self.masters.current.job
        return None if job is None else job._coordinator.plan

    @property
    def coordinators(self) -> int:
        return len(self.masters.all)

    def _open_client(self, node: Node, spec: JobSpec, on_change: Callable[[], None]) -> NodeClient:
        return ClientOfMaster(node, spec, on_change, self.masters)

    def _keep_up(self) -> None:
        self.masters.keep_up(self.timeline.random.choice((0.5, 5.0, 12.0)))

    def _settle(self) -> None:
        self.masters.settle()

    def _demand_rest(self) -> None:
        pass

    def close(self) -> None:
        super().close()
        for master in self.masters.all:
            master.dispose()


@contextmanager
def stand_ins(scenario_laws: Callable[[], Laws]) -> Iterator[None]:
    """What takes the place of sockets and disks, and puts the laws around every decision."""
    from dlrover_run.agent import node_state
    from dlrover_run.coordination import coordinator, policy
    from dlrover_run.master import jobs
    from simulation.disk import DiskJournal

    ports = iter(range(1, 60_000))

    class Port:
        def __init__(self, number: int = 0) -> None:
            self.number = number or next(ports, 0)
            demand(self.number > 0, "nodes do not change their ports for ever")

        def release(self) -> None:
            pass

    decide, adopt = coordinator.decide, policy.recover_plan
    with ExitStack() as stack:
        stack.enter_context(patch.object(node_state, "HeldPort", Port))
        stack.enter_context(patch.object(jobs, "Journal", DiskJournal))
        watched: dict[tuple[Any, str], Callable[..., Any]] = {
            (coordinator, "decide"): lambda *given: scenario_laws().deciding(*given, real=decide),
            (policy, "recover_plan"): lambda *given: scenario_laws().adopting(*given, real=adopt),
        }
        for (module, name), by in watched.items():
            stack.enter_context(patch.object(module, name, by))
        yield


def simulate(seed: int, tell: Callable[[str], None] | None = None, kind: type[Scenario] = MasterScenario) -> Outcome:
    """Run one seed. Raises Broken, whose words name the seed and how to see the run again."""
    found: list[Scenario] = []
    with stand_ins(lambda: found[0].laws):
        try:
            found.append(kind(seed, tell))
            return found[0].run()
        except Broken as broken:
            when = found[0].timeline.now if found else 0.0
            raise Broken(
                f"seed {seed} at {when:.3f} s: {broken}; see (cd tests && python -m simulation {seed}{kind.flag})"
            ) from None
        finally:
            for scenario in found:
                scenario.close()
