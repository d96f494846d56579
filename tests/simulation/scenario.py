"""One run: a job with random rules on random nodes, its faults, and what must hold after the last fault."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

from dlrover_run.coordination.records.plan import Plan
from dlrover_run.spec import JobSpec
from simulation.disk import Disk
from simulation.faults import Faults, MasterFaults
from simulation.invariants import Invariants
from simulation.master_client import ClientOfMaster
from simulation.masters import JOB, Masters
from simulation.network import TO_MASTER, TO_NODE, Weather
from simulation.nodes import Node, NodeClient, Place
from simulation.program import Outcome, Program
from simulation.timeline import Broken, Timeline, demand
from simulation.torch.preparation import SlowTemplate
from simulation.torch.program import TorchProgram

TROUBLES = ("gentle", "nodes", "network", "place", "all", "all")
"""The kinds of faults of a run, besides those of its workers. In a gentle run every loss is notified within a second,
and so is the cause of each failure."""


class Scenario(ABC):
    """The run of one seed, independent of the place of its records. `log` receives the lines of a trace."""

    faults: Faults
    invariants: Invariants
    place: Place
    trouble: str
    calm_at: float
    is_short: bool

    flag = ""

    def __init__(
        self, seed: int, log: Callable[[str], None] | None = None, program: type[Program] = TorchProgram
    ) -> None:
        self.timeline = Timeline(seed, log)
        self.program = program(self, seed)
        self.rules = self.program.rules(self.timeline.random)
        self.nodes: list[Node] = []
        self._hosts = 0

    @property
    @abstractmethod
    def plan(self) -> Plan | None:
        """The current plan."""

    @property
    @abstractmethod
    def coordinators(self) -> int:
        """How many coordinators the job has had."""

    @abstractmethod
    def _open_client(self, node: Node, spec: JobSpec, on_change: Callable[[], None]) -> NodeClient:
        """Open the rendezvous client of a node."""

    def _keep_up(self) -> None:  # noqa: B027 (etcd needs nothing)
        """Start the processes that are needed besides nodes."""

    @abstractmethod
    def _settle(self) -> None:
        """End all faults of the place of the records."""

    def _may_stay(self, node: Node) -> bool:
        """Whether nothing keeps a running node out of the job."""
        return True

    def _furnish(self, weather: Weather) -> None:
        """Draw the environment of nodes."""
        random = self.timeline.random
        self.program.furnish()
        self.place = Place(self.timeline, self._open_client, self.invariants, weather, self._answers)
        self.invariants.calm = self.trouble == "gentle"
        self.calm_at = random.uniform(30, 200)
        self.is_short = random.random() < 0.1

    def _answers(self, node: Node, address: str) -> bool:
        """Whether the machine at that address answers a node: its kernel does, in whatever state its processes are."""
        machine = next(other for other in self.nodes if other.address == address)
        ways = [(each.link, way) for each in (node, machine) for way in (TO_MASTER, TO_NODE)]
        return not machine.machine_lost and all(link.free(way) for link, way in ways)

    def _describe(self, kept: str) -> None:
        self.timeline.note("job", f"{self.rules}")
        self.timeline.note("job", f"trouble with {self.trouble}, {kept}, calm at {self.calm_at:.1f}")

    def add_node(self, node_id: str | None = None) -> Node:
        """Start a process that becomes a node: a new node, or another process with a former id."""
        self._hosts += 1
        node = self.program.new_node(node_id or f"n{self._hosts}", self._hosts, node_id is not None)
        self.nodes.append(node)
        return node

    def any_node(self) -> Node | None:
        living = self.living
        return self.timeline.random.choice(living) if living else None

    @property
    def living(self) -> list[Node]:
        return [node for node in self.nodes if node.alive and not node.left]

    def run(self) -> Outcome:
        """Run the scenario. Raises Broken with the invariant that did not hold."""
        self._begin()
        self.timeline.run_until(self.calm_at, lambda: self.invariants.over is not None)
        self._calm()
        self.program.demand_progress()
        self.program.demand_end()
        self._demand_rest()
        return self.program.outcome()

    def _begin(self) -> None:
        random = self.timeline.random
        for _ in range(self.program.first_nodes()):
            self.timeline.after(random.uniform(0, random.choice((0.1, 10.0))), self.add_node)
        self._keep_up()
        self.program.begin(self.calm_at)
        self.faults.begin(self.calm_at)

    def _calm(self) -> None:
        """End all faults: stopped processes are resumed, and links that were cut are healed."""
        self.timeline.note("job", "all faults are over")
        self.faults.over = True
        self.program.calm()
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
        self.program.replenish(staying)

    def _demand_rest(self) -> None:  # noqa: B027 (a master leaves nothing)
        """Demand what else must hold when every node has ended."""

    def close(self) -> None:
        """Dispose of all processes."""
        for node in self.nodes:
            node.dispose()


class MasterScenario(Scenario):
    """The records are in a master."""

    def __init__(
        self, seed: int, log: Callable[[str], None] | None = None, program: type[Program] = TorchProgram
    ) -> None:
        super().__init__(seed, log, program)
        random = self.timeline.random
        self.durable = random.random() < 0.6 or self.program.always_durable
        self.trouble = random.choice(TROUBLES)
        self.two_places = random.random() < 0.3
        slowness = 0.3 if self.trouble == "gentle" else random.choice((0.01, 0.3, 2.0))
        weather = Weather(slowness, echo=random.choice((0.0, 0.1, 0.6)))
        nodes_stay = self.trouble == "place" and not self.two_places and weather.slowness < 1
        self.invariants = self.program.make_invariants(self.durable, nodes_stay)
        self._seed = seed
        self._disk = disk = Disk(self.invariants, self.timeline) if self.durable else None
        self.masters = Masters(self.timeline, self.invariants, disk, self.two_places, random.random() < 0.2)
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
        if self._disk is None:
            return
        from simulation.latecomers import demand_free_name

        # From a generator of its own: the runs of seeds without it stay the same. The next job has invariants of its
        # own.
        random = Random(f"latecomers {self._seed}")
        self.masters.end()
        if random.random() < 0.5:
            self._disk.restore_end(JOB)
        self.invariants = self._disk.invariants = Invariants(self.rules, durable=False, nodes_stay=False)
        demand_free_name(self.timeline, self.rules, self.invariants, self._disk, random)

    def close(self) -> None:
        super().close()
        for master in self.masters.all:
            master.dispose()


@contextmanager
def stand_ins(scenario_invariants: Callable[[], Invariants]) -> Iterator[None]:
    """Patches that replace sockets and disks, and check the invariants at every decision. What a coordinator decides in
    a trial of a stored plan (`Coordinator.rehearse`) is no decision: its nodes are made up, and nothing of it is kept;
    neither is what an operator's program computes for a status (`Coordinator.compute_wait`)."""
    from dlrover_run.agent import node_state
    from dlrover_run.coordination import coordinator
    from dlrover_run.coordination.rounds import round_engine
    from dlrover_run.master import jobs
    from dlrover_run.workers import starter
    from simulation.disk import DiskJournal
    from tf_ps_runner.cluster import recovery

    ports = iter(range(1, 60_000))

    class Port:
        def __init__(self, number: int = 0) -> None:
            self.number = number or next(ports, 0)
            demand(self.number > 0, "a node changes its ports only a bounded number of times")

        def release(self) -> None:
            pass

    decide, adopt, adopt_cluster = coordinator.decide, round_engine.recover_plan, recovery.recover_cluster

    def without_invariants(
        real: Callable[[coordinator.Coordinator, float], None],
    ) -> Callable[[coordinator.Coordinator, float], None]:
        def run(trial: coordinator.Coordinator, now: float) -> None:
            with patch.object(coordinator, "decide", decide):
                real(trial, now)

        return run

    with ExitStack() as stack:
        stack.enter_context(patch.object(node_state, "HeldPort", Port))
        stack.enter_context(patch.object(starter, "Template", SlowTemplate))
        stack.enter_context(patch.object(jobs, "Journal", DiskJournal))
        watched: dict[tuple[Any, str], Callable[..., Any]] = {
            (coordinator, "decide"): lambda *given: scenario_invariants().deciding(*given, real=decide),
            (coordinator.Coordinator, "rehearse"): without_invariants(coordinator.Coordinator.rehearse),
            (coordinator.Coordinator, "compute_wait"): without_invariants(coordinator.Coordinator.compute_wait),
            (round_engine, "recover_plan"): lambda *given: scenario_invariants().adopting(*given, real=adopt),
            (recovery, "recover_cluster"): lambda *given: scenario_invariants().adopting(*given, real=adopt_cluster),
        }
        for (module, name), by in watched.items():
            stack.enter_context(patch.object(module, name, by))
        yield


def simulate(
    seed: int,
    log: Callable[[str], None] | None = None,
    kind: type[Scenario] = MasterScenario,
    program: type[Program] = TorchProgram,
) -> Outcome:
    """Run one seed. Raises Broken, whose message names the seed and the command that repeats the run."""
    found: list[Scenario] = []
    with stand_ins(lambda: found[0].invariants):
        try:
            found.append(kind(seed, log, program))
            return found[0].run()
        except Broken as broken:
            when = found[0].timeline.now if found else 0.0
            command = f"python -m simulation {seed}{kind.flag}{program.flag}"
            raise Broken(f"seed {seed} at {when:.3f} s: {broken}; see (cd tests && {command})") from None
        finally:
            for scenario in found:
                scenario.close()
