"""A simulated ground truth for the node check: healthy, broken and slow nodes, what they would measure, and the whole
loop of a check as the coordinator runs it.

A *plant* is one planted defect: of a node (it fails at computing, computes wrongly, computes slowly, has no network,
has a slow network) or of the link between two nodes (it does not work, or is slow). Slow means 3 to 10 times slower. A
node that computes slowly may slow down its links too, by up to the same factor. Each measurement has a uniform error of
up to `noise`. An *accident* affects only the first try, or slows down the first two, and is not a defect. A node that
had an accident when it passed an earlier check is known by its slow measurement.

A node is healthy if nothing is planted in it; at most two of its links are bad or slow. A node with three bad links may
be taken for a broken node if it is linked with only these three partners.

What the check can detect, for nodes that are present to the end and are not trusted partners:

- a node fails at computing, or computes wrongly: always;
- a node computes slowly: if, of the nodes with the same number of workers and the same device that can compute, fewer
  are slow than are not; or if there are only two, of which the other is not slow. (3 times slower, with an error of
  20 % on both sides, is just twice.) At least a third of them must have had no accident, or the accident cannot be
  recognised. A node that is known by a slow measurement counts as slow;
- a node has no network: if at least two other nodes have a working link to a third node, or to each other;
- a node has a slow network: if at least three other nodes with the same number of workers have a fast link to another
  of these nodes; two are enough if no node leaves and there are no nodes of another size, which cannot show whether the
  network is slow. In addition, the plants among these nodes, and the nodes that leave, are at most a third of them.
  Nodes that have passed an earlier check must be unchanged, and count as two at most.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import msgspec

from dlrover_run.features.node_check.decision import pairing
from dlrover_run.features.node_check.decision.diagnosis import Diagnosis, diagnose
from dlrover_run.features.node_check.decision.model import (
    CheckedNode,
    CheckKey,
    ComputeFact,
    HealthStatus,
    LinkFact,
    NodeCheck,
)

THRESHOLD = 2.0
NOISE = 0.2
TFLOPS = 0.084
GIGABYTES = 1.2
SLOW = (3.0, 10.0)
"""How many times slower a slow node or link is: drawn from this range."""

OLDER = 4.0
"""How many times slower an old device computes than a new one."""

MOST_BAD_LINKS = 2
"""How many bad or slow links a healthy node may have."""

MAX_CHECK_ROUNDS = 100
"""Rounds after which a check counts as endless."""

Pair = tuple[int, int]


class Computing(Enum):
    """How a node computes, apart from its speed."""

    WELL = "well"
    FAILS = "fails"
    WRONG = "wrong"
    FAILS_ONCE = "fails once"
    SLOW_ONCE = "slow once"
    SLOW_TWICE = "slow twice"


DISTURBED = {Computing.SLOW_ONCE: 1, Computing.SLOW_TWICE: 2}
"""How many tries such a node is slow at."""

ACCIDENTS = (Computing.FAILS_ONCE, *DISTURBED)


@dataclass(frozen=True)
class NodeTruth:
    """The true state of one node. It computes `slower` times slower and its links are `drag` times slower (1: not
    slower). A `cut` node has no network. The node is gone at the end of the round `leaves`. With an `old_device` it
    computes `OLDER` times slower, which is not a fault."""

    computing: Computing = Computing.WELL
    slower: float = 1.0
    drag: float = 1.0
    cut: bool = False
    workers: int = 1
    trusted: bool = False
    leaves: int | None = None
    old_device: bool = False

    @property
    def computes(self) -> bool:
        return self.computing not in (Computing.FAILS, Computing.WRONG)

    @property
    def had_accident(self) -> bool:
        return self.computing in ACCIDENTS

    @property
    def seems_slow(self) -> bool:
        """Whether its measurements stay slow: a node that has passed an earlier check does not compute again."""
        return self.slower > 1 or (self.trusted and self.computing in DISTURBED)

    @property
    def healthy(self) -> bool:
        return self.computes and not self.cut and self.slower == self.drag == 1


@dataclass(frozen=True)
class World:
    """All nodes, and for pairs of nodes how many times slower their link is than others (0: the link is bad)."""

    nodes: tuple[NodeTruth, ...]
    links: Mapping[Pair, float] = field(default_factory=dict)
    noise: float = NOISE

    def link(self, one: int, other: int) -> float:
        """Return how many times slower than others this link is, or 0 if it does not work."""
        ends = self.nodes[one], self.nodes[other]
        slower = self.links.get((min(one, other), max(one, other)), 1.0)
        if not slower or any(end.cut or not end.computes for end in ends):
            return 0.0
        return max(slower, *(end.drag for end in ends))


class Kind(Enum):
    """The kinds of plants."""

    FAILS = "fails at computing"
    WRONG = "computes wrongly"
    SLOW = "computes slowly"
    SLOW_ALL = "computes slowly, which slows its links"
    CUT = "has no network"
    SLOW_NETWORK = "has a slow network"
    BAD_LINK = "bad link"
    SLOW_LINK = "slow link"


LINKS = frozenset({Kind.BAD_LINK, Kind.SLOW_LINK})


def plant(nodes: int, kinds: Sequence[Kind], drawn: random.Random, accidents: float = 0.0) -> World:
    """Return a world with one plant of each given kind, where there is room, and with accidents on healthy nodes."""
    truths = [NodeTruth() for _ in range(nodes)]
    free = drawn.sample(range(nodes), nodes)
    for kind in kinds:
        if kind not in LINKS and free:
            truths[free.pop()] = _broken(kind, drawn)
    for node in free:
        if drawn.random() < accidents:
            truths[node] = NodeTruth(computing=drawn.choice(ACCIDENTS))
    links: dict[Pair, float] = {}
    for kind in kinds:
        if kind in LINKS and (pair := _draw_pair(nodes, links, drawn)) is not None:
            links[pair] = 0.0 if kind is Kind.BAD_LINK else drawn.uniform(*SLOW)
    return World(tuple(truths), links)


def _draw_pair(nodes: int, taken: Mapping[Pair, float], drawn: random.Random) -> Pair | None:
    for _ in range(20):
        one, other = sorted(drawn.sample(range(nodes), 2))
        full = any(sum(end in pair for pair in taken) >= MOST_BAD_LINKS for end in (one, other))
        if (one, other) not in taken and not full:
            return one, other
    return None


def _broken(kind: Kind, drawn: random.Random) -> NodeTruth:
    slower = drawn.uniform(*SLOW)
    return {
        Kind.FAILS: NodeTruth(computing=Computing.FAILS),
        Kind.WRONG: NodeTruth(computing=Computing.WRONG),
        Kind.SLOW: NodeTruth(slower=slower),
        Kind.SLOW_ALL: NodeTruth(slower=slower, drag=drawn.uniform(1.0, slower)),
        Kind.CUT: NodeTruth(cut=True),
        Kind.SLOW_NETWORK: NodeTruth(drag=slower),
    }[kind]


def max_plants(nodes: int) -> int:
    """Return the maximum number of plants: a third of the nodes, and one if there are only two nodes."""
    return max(1, nodes // 3)


def draw_world(drawn: random.Random, nodes: int, accidents: float = 0.05) -> World:
    """Draw a world of that many nodes with plants of any kind, from none to the maximum."""
    kinds = drawn.choices(list(Kind), k=drawn.randint(0, max_plants(nodes)))
    return plant(nodes, kinds, drawn, accidents)


def draw_odd_world(drawn: random.Random, nodes: int) -> World:
    """Draw a world with nodes that have passed an earlier check, that leave during the check, and that differ in
    their number of workers and in their device."""
    world = draw_world(drawn, nodes)
    old_devices = drawn.choice((0.0, 0.0, 0.2, 0.5))
    passed, leaving, large = (drawn.choice(chances) for chances in ((0.0, 0.5, 0.9), (0.0, 0.1), (0.0, 0.3, 0.5)))
    return replace(
        world,
        nodes=tuple(
            replace(
                truth if not (old := drawn.random() < passed) else replace(truth, computing=_passed(truth.computing)),
                trusted=old,
                leaves=drawn.randint(0, 2) if drawn.random() < leaving else None,
                workers=4 if drawn.random() < large else 1,
                old_device=drawn.random() < old_devices,
            )
            for truth in world.nodes
        ),
    )


def _passed(computing: Computing) -> Computing:
    return computing if computing in DISTURBED else Computing.WELL


def expected_statuses(world: World) -> dict[int, HealthStatus]:
    """Return what the check can detect of each node, as the docstring of this module defines it."""
    nodes = world.nodes
    expected: dict[int, HealthStatus] = {}
    staying = [node for node, truth in enumerate(nodes) if truth.leaves is None]
    able = [node for node in staying if nodes[node].computes]
    for node in staying:
        truth = nodes[node]
        peers = [other for other in able if nodes[other].workers == truth.workers]
        if truth.trusted:
            continue
        if not truth.computes:
            expected[node] = HealthStatus.FAULT
        elif truth.cut:
            others = [other for other in able if other != node]
            if sum(any(world.link(one, other) for other in others if other != one) for one in others) >= 2:
                expected[node] = HealthStatus.FAULT
        elif truth.slower > 1:
            # A node that leaves may or may not be present when its status is decided.
            kind = (truth.workers, truth.old_device)
            alike = [other for other in nodes if (other.workers, other.old_device) == kind and other.computes]
            slow = sum(other.seems_slow for other in alike)
            quick = [nodes[n] for n in peers if nodes[n].old_device == truth.old_device and not nodes[n].seems_slow]
            quick_at_first = sum(not other.had_accident for other in quick)
            fewer = slow < len(quick) or (slow, len(quick), len(alike)) == (1, 1, 2)
            if fewer and 3 * quick_at_first >= len(alike):
                expected[node] = HealthStatus.STRAGGLER
        elif truth.drag > 1:
            linking = [other for other in peers if not nodes[other].cut]
            undragged = [other for other in linking if nodes[other].drag == 1]
            all_alike = all(other.leaves is None and other.workers == truth.workers for other in nodes)
            enough = 2 if all_alike else 3
            witnesses = sum(any(world.link(one, end) == 1 for end in undragged if end != one) for one in undragged)
            if _troubles(world, truth.workers) <= 1 / 3 and 2 * len(undragged) > len(linking) and witnesses >= enough:
                expected[node] = HealthStatus.STRAGGLER
    return expected


def _troubles(world: World, workers: int) -> float:
    """Return the share of plants and of leaving nodes among the nodes with that many workers."""
    peers = {node for node, truth in enumerate(world.nodes) if truth.workers == workers}
    if any(world.nodes[node].trusted and not world.nodes[node].healthy for node in peers):
        return 1.0
    nodes = sum(not world.nodes[node].healthy or world.nodes[node].leaves is not None for node in peers)
    # At least two of the nodes that have passed take part if they are needed.
    taking_part = sum(not world.nodes[node].trusted for node in peers)
    taking_part += min(2, len(peers) - taking_part)
    return (nodes + sum(peers.issuperset(pair) for pair in world.links)) / taking_part


@dataclass(frozen=True)
class Outcome:
    """The result of a check. `held` has the tasks of its rounds."""

    check: NodeCheck
    diagnosis: Diagnosis
    held: tuple[pairing.RoundTasks, ...]

    @property
    def named(self) -> dict[int, HealthStatus]:
        """The nodes that were named, with their status."""
        statuses = (finding.status for finding in self.diagnosis.findings)
        return {node: status for node, status in enumerate(statuses) if status is not HealthStatus.PASSED}


class Trial:
    """One check of one world. The measurements come from `drawn`, so the same seed has the same measurements."""

    def __init__(self, world: World, drawn: random.Random) -> None:
        self._world = world
        self._drawn = drawn
        self._tries = [0] * len(world.nodes)

    def run(
        self,
        measure_links: bool = False,
        diagnose_with: Callable[[NodeCheck, float], Diagnosis] = diagnose,
        beside: bool = False,
    ) -> Outcome:
        """Run the whole loop: all nodes compute before it begins, then rounds until no round can find out more."""
        check = NodeCheck(
            key=CheckKey(1, 1, 0),
            since=0.0,
            nodes=tuple(self._examinee(node) for node in range(len(self._world.nodes))),
            compute_facts=tuple(self._compute(node) for node in range(len(self._world.nodes))),
            during_training=beside,
        )
        tasks: pairing.RoundTasks | None = pairing.first_round(check, measure_links)
        assert tasks is not None
        if not any(tasks):
            # A single node, or a node that joins a training job: it may compute once more.
            diagnosis = diagnose_with(check, THRESHOLD)
            tasks = pairing.next_round(check, diagnosis, measure_links)
        held = []
        while tasks is not None:
            held.append(tasks)
            assert len(held) < MAX_CHECK_ROUNDS, "the check never ends"
            check = self._hold(check, tasks, len(held) - 1)
            diagnosis = diagnose_with(check, THRESHOLD)
            tasks = pairing.next_round(check, diagnosis, measure_links)
        return Outcome(check, diagnosis, tuple(held))

    def _examinee(self, node: int) -> CheckedNode:
        truth = self._world.nodes[node]
        return CheckedNode(
            node_id=f"n{node}",
            incarnation="1",
            host=f"node{node}",
            address=f"10.0.0.{node}",
            port=1,
            workers=truth.workers,
            already_passed=truth.trusted,
        )

    def _hold(self, check: NodeCheck, tasks: pairing.RoundTasks, number: int) -> NodeCheck:
        gone = {node for node, truth in enumerate(self._world.nodes) if truth.leaves is not None}
        gone = {node for node in gone if (self._world.nodes[node].leaves or 0) <= number}
        nodes = tuple(
            msgspec.structs.replace(checked, is_here=node not in gone) for node, checked in enumerate(check.nodes)
        )
        links = [
            self._link(*pair, gone)
            for group in tasks.groups
            for pair in (itertools.combinations(group, 2) if len(group) > 1 else [(group[0], group[0])])
        ]
        return msgspec.structs.replace(
            check,
            key=CheckKey(1, 1, number),
            nodes=nodes,
            compute=tasks.compute,
            groups=tasks.groups,
            compute_facts=check.compute_facts + tuple(self._compute(node) for node in tasks.compute),
            link_facts=check.link_facts + tuple(links),
        )

    def _compute(self, node: int) -> ComputeFact:
        truth = self._world.nodes[node]
        earlier = self._tries[node]
        self._tries[node] += 1
        # The measurement is always drawn, so a fault does not shift the other measurements of this seed.
        speed = TFLOPS / truth.slower / (OLDER if truth.old_device else 1) * self._off()
        if truth.computing is Computing.WRONG:
            return ComputeFact(node, problem="a product is wrong", wrong=True)
        if truth.computing is Computing.FAILS or (truth.computing is Computing.FAILS_ONCE and not earlier):
            return ComputeFact(node, problem="local rank 0 was killed by SIGKILL")
        if earlier < DISTURBED.get(truth.computing, 0):
            speed /= SLOW[1]
        return ComputeFact(node, speed, device="old" if truth.old_device else "new")

    def _link(self, one: int, other: int, gone: set[int]) -> LinkFact:
        one, other = min(one, other), max(one, other)
        off = min(self._off(), self._off())
        slower = self._world.link(one, other)
        if not slower or one in gone or other in gone:
            return LinkFact(one, other, problem="no answer for 30 s")
        return LinkFact(one, other, GIGABYTES / slower * off)

    def _off(self) -> float:
        return self._drawn.uniform(1 - self._world.noise, 1 + self._world.noise)


def check_world(
    world: World,
    seed: object = 0,
    measure_links: bool = False,
    diagnose_with: Callable[[NodeCheck, float], Diagnosis] = diagnose,
    beside: bool = False,
) -> Outcome:
    """Check the world once, with the measurements of that seed."""
    return Trial(world, random.Random(str(seed))).run(measure_links, diagnose_with, beside)


def whole(nodes: int) -> World:
    """Return a world without plants."""
    return World((NodeTruth(),) * nodes)


def with_nodes(world: World, **changes: NodeTruth) -> World:
    """Return the same world with some nodes replaced: `n3=NodeTruth(cut=True)`."""
    nodes = list(world.nodes)
    for name, truth in changes.items():
        nodes[int(name.removeprefix("n"))] = truth
    return replace(world, nodes=tuple(nodes))
