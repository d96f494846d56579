"""The faults of a run until it is calm, and how often they happen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from simulation.disk import Disk
from simulation.network import TO_MASTER, TO_NODE
from simulation.nodes import Node

if TYPE_CHECKING:
    from simulation.scenario import MasterScenario, Scenario

Fault = Callable[[], None]


class Faults(ABC):
    """Chooses faults at random, each run with other frequencies. The faults of `place` affect the place of the records;
    every node is notified of a `gentle` fault within a second."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._timeline = scenario.timeline
        self._random = scenario.timeline.random
        self.over = False
        tasks = scenario.program.faults()
        gentle, place = self._gentle(), self._place()
        rough = [self._lose_machine, self._stop_node, self._twin]
        network = [self._cut_off, self._cut_one_way, self._break_stream, self._break_all_streams]
        kinds = {
            "gentle": gentle,
            "nodes": gentle + rough,
            "network": network,
            "place": place,
            "all": gentle + rough + network + place,
        }[scenario.trouble]
        self._taste = [(kind, self._random.choice((0, 1, 1, 4))) for kind in kinds]
        self._taste += [(kind, self._random.choice((0, 1, 3))) for kind in tasks]
        self._pause = self._random.choice((1.0, 4.0, 15.0, 15.0))

    def begin(self, until: float) -> None:
        """Let faults happen until that time, from now on or after the time in which a first round can form."""
        self._until = until
        self._timeline.after(self._random.choice((0.0, 10.0, 35.0)), self._next)

    def _gentle(self) -> list[Fault]:
        return [self._kill_node, self._ask_to_go, self._join, self._return]

    @abstractmethod
    def lose_coordinator(self) -> None:
        """The process that coordinates the job is killed."""

    @abstractmethod
    def _place(self) -> list[Fault]:
        """The faults of the place of the records."""

    def _next(self) -> None:
        self._timeline.after(self._random.expovariate(1 / self._pause), self._happen)

    def _happen(self) -> None:
        if self.over or self._timeline.now >= self._until:
            return
        kinds = [kind for kind, weight in self._taste for _ in range(weight)]
        if kinds:
            self._random.choice(kinds)()
            self._next()

    def _node(self) -> Node | None:
        return self._scenario.any_node()

    def _later(self, most: float, act: Fault) -> None:
        """Undo a fault after at most that many seconds, unless all faults have been undone by then."""
        self._timeline.after(self._random.uniform(0.05, most), lambda: None if self.over else act())

    def _kill_node(self) -> None:
        if (node := self._node()) is not None:
            node.kill()

    def _lose_machine(self) -> None:
        if (node := self._node()) is not None:
            node.kill(silent=True)

    def _stop_node(self) -> None:
        if (node := self._node()) is not None:
            node.stop()
            self._later(self._random.choice((1.0, 5.0, 30.0)), node.resume)

    def _ask_to_go(self) -> None:
        nodes = self._scenario.living if self._random.random() < 0.05 else [self._node()]
        for node in nodes:
            if node is not None:
                node.ask_to_go()

    def _cut_off(self) -> None:
        some = [node for node in self._scenario.living if self._random.random() < 0.4]
        for node in some:
            node.note("is cut off")
            for direction in (TO_MASTER, TO_NODE):
                node.link.hold(direction)

        def heal() -> None:
            for node in some:
                node.link.heal()

        self._later(self._random.choice((1.0, 10.0, 40.0)), heal)

    def _cut_one_way(self) -> None:
        if (node := self._node()) is not None:
            direction = self._random.choice((TO_MASTER, TO_NODE))
            node.note("sends nothing" if direction == TO_MASTER else "receives nothing")
            node.link.hold(direction)
            self._later(self._random.choice((1.0, 10.0, 40.0)), node.link.heal)

    def _break_stream(self) -> None:
        if (node := self._node()) is not None:
            node.note("its stream breaks")
            node.rendezvous.cut()

    def _break_all_streams(self) -> None:
        for node in self._scenario.living:
            node.rendezvous.cut()

    def _join(self) -> None:
        if len(self._scenario.living) < self._scenario.rules.max_nodes + 3:
            self._scenario.add_node()

    def _return(self) -> None:
        gone = [node for node in self._scenario.nodes if not node.alive]
        if gone and len(self._scenario.living) < self._scenario.rules.max_nodes + 3:
            self._scenario.add_node(self._random.choice(gone).key.node_id)

    def _twin(self) -> None:
        if (node := self._node()) is not None:
            self._scenario.add_node(node.key.node_id)


class MasterFaults(Faults):
    """The faults of masters, in addition to those of nodes and of the network."""

    def __init__(self, scenario: MasterScenario, disk: Disk | None) -> None:
        self._masters = scenario.masters
        self._disk = disk
        super().__init__(scenario)

    def _place(self) -> list[Fault]:
        return [self.lose_coordinator, self._blow_fuse, self._stop_master, self._fill_disk]

    def lose_coordinator(self) -> None:
        if self._masters.current.alive:
            silent = self._random.random() < 0.2
            # Nodes that are not notified of the end find the next master later, and too late for its grace period.
            self._scenario.invariants.nodes_stay &= not silent
            self._masters.current.kill(silent)

    def _blow_fuse(self) -> None:
        self._masters.current.fuse = self._random.randint(0, 12)

    def _stop_master(self) -> None:
        master = self._masters.current
        if master.alive:
            master.stop()
            self._later(self._random.choice((1.0, 10.0, 60.0)), master.resume)

    def _fill_disk(self) -> None:
        disk = self._disk
        if disk is not None:
            disk.full = disk.invariants.slow_disk = True

            def empty() -> None:
                disk.full = False

            self._later(10.0, empty)
