"""One run from one seed: which nodes there are, what happens to them and when, and what it has to come to."""

from __future__ import annotations

from collections.abc import Callable

from simulation.parameter_servers.tensorflow import LEFT
from simulation.timeline import demand

from cluster_simulation.nodes import FORCED, Node
from cluster_simulation.world import ALL_ROOMS, PATIENCE, TROUBLE, Outcome, World
from dlrover_run.coordination.model import OVER
from dlrover_run.policies.parameter_servers.model import Capacity, DesiredReplicas, EndCause, Role, TaskEnd

ENDS = (
    FORCED,
    FORCED,
    FORCED,
    LEFT,
    TaskEnd(EndCause.MEMORY, "was killed for its memory"),
    TaskEnd(EndCause.SILENT, "does not answer"),
    TaskEnd(EndCause.SUCCESS, "exited with code 0"),
)


def simulate(seed: int, tell: Callable[[str], None] | None = None) -> Outcome:
    """Raise Broken when a law does not hold in this run."""
    world = World(seed, tell)
    Scenario(world).prepare()
    world.run(TROUBLE, lambda: False)
    heal(world)
    world.run(TROUBLE + PATIENCE, lambda: world.plan.phase in OVER)
    demand(
        world.plan.phase in OVER, f"seed {seed}: the job does not end: {world.cluster.stage.value}, {world.plan.reason}"
    )
    world.run(world.timeline.now + 15, lambda: False)
    left = [p.task.key for node in world.living() for p in node.processes()]
    demand(not left, f"seed {seed}: {left and left[0]} lives on when the job is over")
    spent = world.cluster.roles
    charged = sum(one.failures + one.memory_restarts for one in spent)
    return Outcome(world.plan.phase.value, world.cluster.version, len(world.laws.spared), charged, world.plan.reason)


def heal(world: World) -> None:
    """From now on nothing fails any more, and there is room for all."""
    world.troubled = False
    world.hanging = world.crashing = 0.0
    for node in world.nodes:
        node.cut = False
    if world.timeline.random.random() < 0.8 or not world.living():
        world.add_node("late", (*ALL_ROOMS, Capacity(Role.EVALUATOR, 1)))
    world.start_coordinator()


class Scenario:
    """Chooses what happens."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.random = world.timeline.random
        self._wishes = 0

    def prepare(self) -> None:
        """Order all that will happen."""
        at, random = self.world.timeline.at, self.random
        at(random.uniform(0, 1), self.world.start_coordinator)
        names = [f"node{number}" for number in range(random.randint(1, 6))]
        for name in names:
            rooms = self._rooms()
            at(random.choice((0, 0, random.uniform(0, 10))), lambda n=name, r=rooms: self.world.add_node(n, r))
        for _ in range(random.choice((0, 2, 5, 12))):
            at(random.uniform(0, TROUBLE), self._something)

    def _rooms(self) -> tuple[Capacity, ...]:
        if self.random.random() < 0.4:
            return (*ALL_ROOMS, Capacity(Role.EVALUATOR, 1))
        return tuple(Capacity(role, self.random.randint(1, 2)) for role in Role if self.random.random() < 0.5)

    def _something(self) -> None:
        kind = self.random.choice(
            (
                self._kill_process,
                self._kill_process,
                self._kill_process,
                self._kill_servers,
                self._kill_node,
                self._cut,
                self._leave,
                self.world.crash_coordinator,
                self._wish,
                self._wish,
                self._wish,
                self._swell,
                self._hang,
                self._arrive,
            )
        )
        kind()

    def _node(self) -> Node | None:
        living = self.world.living()
        return self.random.choice(living) if living else None

    def _kill_process(self) -> None:
        processes = [p for node in self.world.living() for p in node.processes()]
        if processes:
            process = self.random.choice(processes)
            how = self.random.choice(ENDS)
            if how.cause is not EndCause.SUCCESS or process.task.role is not Role.CHIEF:
                process.end(how)

    def _kill_servers(self) -> None:
        for node in self.world.living():
            for process in node.processes():
                if process.task.role is Role.PS:
                    process.end(FORCED)

    def _kill_node(self) -> None:
        node = self._node()
        if node is None:
            return
        node.die()
        if self.random.random() < 0.7:
            name, rooms = node.key.node_id, node.rooms
            self.world.timeline.after(self.random.uniform(0.1, 10), lambda: self.world.add_node(name, rooms))

    def _cut(self) -> None:
        node = self._node()
        if node is None or node.cut:
            return
        node.note("is cut off")
        node.cut = node.stale = self.world.laws.was_cut = True
        node.heard_again = False
        self.world.network.broke(node)

        def mend() -> None:
            node.note("is reachable again")
            node.cut = False

        self.world.timeline.after(self.random.choice((0.2, 0.8, self.random.uniform(0.5, 15))), mend)

    def _leave(self) -> None:
        node = self._node()
        if node is not None and len(self.world.living()) > 1:
            node.leave()

    def _wish(self) -> None:
        node = self._node()
        if node is not None:
            self._wishes += 1
            numbers = [None, *range(5)]
            node.scale_request = DesiredReplicas(self.random.choice(numbers), self.random.choice(numbers))
            node.scale_request_number = self._wishes
            node.note(f"asks for {node.scale_request}")
            node.publish()

    def _swell(self) -> None:
        for node in self.world.living():
            for process in node.processes():
                if process.task.role is Role.PS and self.random.random() < 0.5:
                    process.near_memory_limit = True
                    node.publish()

    def _hang(self) -> None:
        """A process stands still. Of a server its agent finds that out; the others only block each other."""
        servers = [p for node in self.world.living() for p in node.processes() if p.task.role is Role.PS]
        if servers:
            process = self.random.choice(servers)
            process.hangs = True
            silent = TaskEnd(EndCause.SILENT, "does not answer")
            self.world.timeline.after(self.random.uniform(2, 6), lambda: process.end(silent))

    def _arrive(self) -> None:
        self.world.add_node(f"more{self.random.randint(0, 10**6)}", self._rooms())
