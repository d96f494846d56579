"""Jobs whose nodes start their master themselves, on their machines: the machine of the endpoint is lost, and then that
of its successor, or the network is divided, or the first node of those that the cluster lists comes late; also before
the first round. The client, the rule of succession and the masters are the product's; the launcher, the probes and the
network between two machines are simulated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodePhase
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds.quorum import LostMaster
from dlrover_run.rendezvous import kinds
from dlrover_run.rendezvous.master_client import client as master_client
from dlrover_run.rendezvous.reach import Reach
from dlrover_run.spec import JobSpec
from dlrover_run.transport.addresses import Address
from dlrover_run.transport.connection import ConnectionLost
from simulation.backends import WrittenNode
from simulation.invariants import Invariants
from simulation.master_client import SimulatedConnection, WatchedMasterClient
from simulation.masters import JOB, Inbox, Master
from simulation.network import TO_MASTER, TO_NODE, Link, Stream, Weather
from simulation.nodes import Node, NodeClient, Place, job_spec
from simulation.scenario import stand_ins
from simulation.timeline import Broken, Timeline, demand

ENDPOINT = "10.1.0.1"
MASTER_START = 0.3
"""Seconds from the start of a master until it listens."""

END = 170.0
"""Seconds of a run: all that was lost or divided has long been decided."""

CHECK_INTERVAL = 0.1
"""Seconds between two checks of the invariant of one world."""

KINDS = ("lose", "lose", "lose both", "divide", "late", "late")

EARLY_KINDS = ("lose early", "divide early", "lose and divide early")
"""What happens before the first round, in runs of their own."""

DIVIDED = ("divide", "divide early", "lose and divide early")


class PlacedMaster(Master):
    """A master that a node has started; `lost` is as in `Coordinator`."""

    def __init__(self, world: World, host: str, started_ms: int, lost: LostMaster | None) -> None:
        self._lost = lost
        super().__init__(world.timeline, f"master at {host}", None, started_ms, world.invariants)

    def _begin(self, disk: Any, started_ms: int) -> None:
        super()._begin(disk, started_ms)
        self.jobs._names_successors = True
        self.jobs._lost = self._lost

    @property
    def plan(self) -> Plan | None:
        job = self.jobs._jobs.get(JOB) if self.alive else None
        return None if job is None else job._coordinator.plan


@dataclass
class Launcher:
    """In place of `MasterLauncher`: starts a master on the machine of a node, if the address is of that machine."""

    world: World
    own: str
    host: str
    lost: LostMaster | None = None
    problem: str | None = None

    @property
    def pids(self) -> set[int]:
        return set()

    async def ensure(self, addresses: Sequence[Address]) -> None:
        if self.own == self.host and not self.world.listens(self.host):
            await asyncio.sleep(MASTER_START)
            if not self.world.listens(self.host):
                self.world.start_master(self.host, self.lost)


class PlacedConnection(SimulatedConnection):
    """A stream to the master at an address."""

    def __init__(self, world: World, node: Node, host: str) -> None:
        if not world.listens(host) or world.divided(node.address, host):
            raise ConnectionLost("nothing listens there")
        self.stream = Stream(node.timeline, world.link(node.address, host), node.place.weather)
        self._inbox = Inbox(node)
        self.stream.listen(TO_NODE, node, self._inbox.put)
        world.masters[host].accept(self.stream)


class PlacedClient(NodeClient):
    """The client of a node that may start masters."""

    def __init__(self, world: World, node: Node, spec: JobSpec, on_change: Any) -> None:
        super().__init__(node)
        self._streams: list[Stream] = []
        master = kinds.Master(ENDPOINT, 29400, is_host=node.address == ENDPOINT, hosts=world.listed)
        spec = replace(spec, rendezvous=master)

        def connect(spec: kinds.Master, addresses: Sequence[Address]) -> PlacedConnection:
            connection = PlacedConnection(world, node, addresses[0].host)
            self._streams.append(connection.stream)
            return connection

        async def probe(host: str, port: int) -> Reach:
            await asyncio.sleep(0.05)
            return world.reach(node.address, host)

        random = world.timeline.random.random
        client = WatchedMasterClient(
            node, spec, on_change, node.note, connect=connect, rng=random, reaches=node.reaches, probe=probe
        )
        client._launcher = Launcher(world, node.address, ENDPOINT)
        self.client = client

    def break_off(self, silent: bool) -> None:
        for stream in self._streams:
            stream.close(TO_MASTER, silent=silent)


class RunningNode(WrittenNode):
    """A node whose workers run for as long as it has ranks."""

    def _send(self) -> None:
        if not self.left:
            self._state.accept(self.assignment)
            runs = self.assignment.ranks is not None
            self.rendezvous.report(self._state.report(phase=NodePhase.RUNNING if runs else NodePhase.WAITING))


class World:
    """One run of a seed."""

    def __init__(self, seed: int, lines: list[str] | None = None, kinds: Sequence[str] = KINDS) -> None:
        self.timeline = Timeline(seed, None if lines is None else lines.append)
        random: Random = self.timeline.random
        self.kind = random.choice(kinds)
        most = random.randint(3, 6)
        # Of a divided network both sides may have enough nodes for a round.
        halves = self.kind in DIVIDED or (self.kind == "late" and random.random() < 0.7)
        greatest = max(2, most // 2) if halves else most
        self.rules = JobRules(min_nodes=random.randint(2, greatest), max_nodes=most, last_call_timeout=5.0)
        addresses = [f"10.1.0.{number}" for number in range(1, most + 1)]
        # Before the first round a node knows only those that the cluster lists.
        self.listed = tuple(addresses) if self.kind in ("late", *EARLY_KINDS) else ()
        self.invariants = Invariants(self.rules, durable=False, nodes_stay=False)
        self.masters: dict[str, PlacedMaster] = {}
        self.all: list[PlacedMaster] = []
        self.nodes: dict[str, RunningNode] = {}
        self.every_node: list[RunningNode] = []
        self.silent: set[str] = set()
        self.side: set[str] = set()
        self.links: dict[tuple[str, str], Link] = {}
        self.place = Place(
            self.timeline,
            lambda node, spec, on_change: PlacedClient(self, node, spec, on_change),
            self.invariants,
            Weather(random.choice((0.01, 0.3)), 0.0),
            lambda node, address: self.reach(node.address, address) is not Reach.SILENT,
        )
        self._next_check = 0.0
        self.is_early = False
        """Whether the first node was lost, or the network divided, before the first round."""

    def link(self, node: str, host: str) -> Link:
        return self.links.setdefault((node, host), Link())

    def divided(self, one: str, other: str) -> bool:
        return one != other and ((one in self.side) != (other in self.side))

    def listens(self, host: str) -> bool:
        return host not in self.silent and host in self.masters and self.masters[host].alive

    def reach(self, own: str, host: str) -> Reach:
        if host in self.silent or self.divided(own, host):
            return Reach.SILENT
        return Reach.ACCEPTS if self.listens(host) else Reach.REFUSES

    def start_master(self, host: str, lost: LostMaster | None) -> None:
        started = 1_700_000_000_000 + int(self.timeline.now * 1000)
        self.masters[host] = PlacedMaster(self, host, started, lost)
        self.all.append(self.masters[host])

    def start_node(self, address: str) -> None:
        number = len(self.every_node) + 1
        self.silent.discard(address)
        spec = job_spec(f"n{address}", address, 1, "default", None, self.rules)
        node = RunningNode(self.place, spec, f"n{number}", f"i{number}", None)
        self.nodes[address] = node
        self.every_node.append(node)
        node.report()

    def lose(self, address: str, silent: bool) -> None:
        """Lose a node with its master; `silent`: with its machine."""
        if silent:
            self.silent.add(address)
        if address in self.masters and self.masters[address].alive:
            self.masters[address].kill(silent)
        self.nodes[address].kill(silent)

    def divide(self, side: set[str]) -> None:
        self.side = side
        for node in self.nodes:
            for host in self.nodes:
                if self.divided(node, host):
                    for way in (TO_MASTER, TO_NODE):
                        self.link(node, host).hold(way)

    def heal(self) -> None:
        self.side = set()
        for link in self.links.values():
            link.heal()

    def place_of_job(self) -> str:
        """Where the latest master with a round is."""
        trains = [host for host in self.masters if (plan := self.masters[host].plan) and plan.key.number]
        demand(bool(trains), "a master has the job while enough nodes live")
        return max(trains, key=lambda host: self.all.index(self.masters[host]))

    def check(self) -> bool:
        """The invariant of one world: of the masters that live, one has a round whose nodes are all connected to it."""
        if self.timeline.now < self._next_check:
            return False
        self._next_check = self.timeline.now + CHECK_INTERVAL
        worlds = []
        for master in self.all:
            plan = master.plan
            if plan is not None and plan.phase is PlanPhase.TRAINING and plan.key.epoch == plan.epoch:
                members = master.jobs._jobs[JOB]._coordinator.nodes
                if all(member.key in members and members[member.key].connected for member in plan.members):
                    worlds.append((master.name, plan.key, len(plan.members)))
        demand(len(worlds) <= 1, f"one world trains, not {worlds}")
        return False

    def run(self) -> tuple[str, int]:
        """Play the run. Returns its kind and how many masters there were. Raises Broken."""
        random = self.timeline.random
        most, least = self.rules.max_nodes, self.rules.min_nodes
        goes_on = most - 1 >= least
        addresses = [f"10.1.0.{number}" for number in range(1, most + 1)]
        kind = self.kind
        if kind == "late":
            return self.run_late(addresses)
        if kind in EARLY_KINDS:
            return self.run_early(addresses)
        for address in addresses:
            self.timeline.after(random.uniform(0, 2), partial(self.start_node, address))
        self.timeline.run_until(20.0, self.check)
        silent = random.random() < 0.5
        if kind == "divide":
            self.divide(set(addresses[: random.choice((least, random.randint(1, most - 1)))]))
            self.timeline.run_until(60.0 + random.uniform(0, 30), self.check)
            self.heal()
        else:
            self.lose(ENDPOINT, silent)
            self.timeline.run_until(60.0, self.check)
            if kind == "lose both" and goes_on and most >= 5 and most - 2 >= least:
                self.lose(self.place_of_job(), random.random() < 0.5)
                self.timeline.run_until(110.0, self.check)
            if goes_on:
                self.demand_one_world([node for node in self.nodes.values() if node.alive])
                self.start_node(ENDPOINT)
        self.timeline.run_until(END, self.check)
        if kind != "divide" and goes_on:
            self.demand_one_world([node for node in self.nodes.values() if node.alive])
        return kind, len(self.all)

    def run_late(self, addresses: list[str]) -> tuple[str, int]:
        """The first node comes late; until then its machine is silent, or refuses connections."""
        random = self.timeline.random
        most, least = self.rules.max_nodes, self.rules.min_nodes
        if random.random() < 0.5:
            self.silent.add(ENDPOINT)
        spread = random.choice((2.0, 2.0, 60.0))
        for address in addresses[1:]:
            self.timeline.after(random.uniform(0, spread), partial(self.start_node, address))
        divided = random.random() < 0.3
        # The half of an old master that is filled by new nodes is the exception that docs/design-notes.md names.
        comes = random.uniform(121, 130) if divided else random.uniform(20, 110)
        self.timeline.after(comes, partial(self.start_node, ENDPOINT))
        if divided:
            self.timeline.run_until(random.uniform(1, 50), self.check)
            self.divide(set(addresses[: random.choice((least, random.randint(1, most - 1)))]))
            self.timeline.run_until(120.0, self.check)
            self.heal()
        self.timeline.run_until(END, self.check)
        # A node that was cut off without workers has given up, and its launcher has ended.
        self.demand_one_world([node for node in self.nodes.values() if node.alive and node.rendezvous.problem is None])
        return self.kind, len(self.all)

    def run_early(self, addresses: list[str]) -> tuple[str, int]:
        """Before the first round the first node is lost, or the network is divided, or both. Later the network heals,
        and the first node starts again."""
        random = self.timeline.random
        most, least = self.rules.max_nodes, self.rules.min_nodes
        spread = random.choice((2.0, 2.0, 20.0))
        for address in addresses[:-1]:
            self.timeline.after(random.uniform(0, spread), partial(self.start_node, address))
        # Without this one the first round waits for its last call.
        self.timeline.after(random.uniform(20, 50), partial(self.start_node, addresses[-1]))
        self.timeline.run_until(random.uniform(1, 6), self.check)
        self.is_early = not any(master.plan and master.plan.key.number for master in self.all)
        loses = self.kind != "divide early" and ENDPOINT in self.nodes
        if loses:
            self.lose(ENDPOINT, random.random() < 0.5)
        if self.kind in DIVIDED:
            self.divide(set(addresses[: random.choice((least, random.randint(1, most - 1)))]))
        self.timeline.run_until(110.0, self.check)
        self.heal()
        goes_on = most - loses >= least
        if goes_on and self.kind == "lose early":
            self.demand_one_world([node for node in self.nodes.values() if node.alive])
        if loses:
            self.start_node(ENDPOINT)
        self.timeline.run_until(END, self.check)
        # Nodes that had met the master and were cut off without workers have given up.
        nodes = [node for node in self.nodes.values() if node.alive and node.rendezvous.problem is None]
        if goes_on and len(nodes) >= least:
            self.demand_one_world(nodes)
        return self.kind, len(self.all)

    def demand_one_world(self, nodes: list[RunningNode]) -> None:
        rounds = {node.assignment.ranks.key if node.assignment.ranks else None for node in nodes}
        demand(len(rounds) == 1 and None not in rounds, f"the nodes that live train in one round, not in {rounds}")
        known = {plan.key for master in self.all if (plan := master.plan) is not None}
        demand(rounds <= known, "a master has the job while enough nodes live")

    def dispose(self) -> None:
        for process in (*self.every_node, *self.all):
            process.dispose()


def play(seed: int, lines: list[str] | None = None, kinds: Sequence[str] = KINDS) -> tuple[str, int]:
    """Play one seed. Raises Broken, whose message names the seed."""
    return play_world(World(seed, lines, kinds), seed)


def play_world(world: World, seed: int) -> tuple[str, int]:
    """Play the run of a seed. Raises Broken, whose message names the seed."""
    with ExitStack() as stack:
        stack.enter_context(stand_ins(lambda: world.invariants))

        def launch(spec: kinds.Master, log: object, lost: LostMaster | None = None) -> Launcher:
            return Launcher(world, spec.host, spec.host, lost)

        stack.enter_context(patch.object(master_client, "MasterLauncher", launch))
        stack.callback(world.dispose)
        try:
            return world.run()
        except Broken as broken:
            flag = "--early-succession" if world.kind in EARLY_KINDS else "--succession"
            command = f"python -m simulation {seed} {flag}"
            raise Broken(f"seed {seed} at {world.timeline.now:.3f} s: {broken}; see (cd tests && {command})") from None
