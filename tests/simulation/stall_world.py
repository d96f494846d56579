"""A round of three nodes with two workers each, whose stalls are looked for: the real watch, detectors, messages and
policy in virtual time, with delays that are drawn from a seed.

Workers train by themselves, all in step with each other, or in two groups. One of them may hang. Rank 0 evaluates for a
minute, while those that train in step with it wait, in a collective, or by looking for a file again and again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

from support.policy_parts import running_report
from support.virtual_loop import run_virtually

from dlrover_run.coordination.decision import update_plan
from dlrover_run.coordination.membership import KnownNode
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import Member, RoundKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds.ranks import rank_assignments
from dlrover_run.features.hangs.node.diagnosis import CoordinatedDiagnosis
from dlrover_run.features.hangs.node.round_watch import RoundWatch
from dlrover_run.features.hangs.node.stall_report import StallReport
from dlrover_run.features.hangs.node.stall_watch import Sources, StallWatch
from dlrover_run.features.hangs.search.outside import LearnedPauses
from dlrover_run.features.hangs.search.round_detectors import RoundDetectors
from dlrover_run.features.hangs.stalls.observer import StallObserver
from dlrover_run.features.hangs.stalls.rules import StallRules
from dlrover_run.observe.processes import ProcessFigures, WorkerFigures
from dlrover_run.observe.records import Evidence, Traffic
from dlrover_run.observe.tick import Tick
from dlrover_run.stacks.stack import Frame, Stack, Thread
from simulation.timeline import Broken

KEY = RoundKey(1, 1)
NODES, PER_NODE = 3, 2
RANKS = NODES * PER_NODE
GROUPS = ((range(RANKS),), (range(4), range(4, RANKS)), tuple(range(rank, rank + 1) for rank in range(RANKS)))
MAX_DELAY = 1.5
"""Seconds that a message is under way."""

LEARNING = 40.0
PAUSE = 60.0
SETTLED = 120.0
"""Seconds after which a worker that hangs must have been named."""


def _stack(*frames: Frame) -> Stack:
    return Stack((Thread("0x1", frames),))


STEP = Frame("/u/train.py", 9, "step")
WAITS = _stack(Frame("/x/site-packages/torch/distributed/c10d.py", 3, "all_reduce"), STEP)
SLEEPS = _stack(Frame("/u/train.py", 20, "look_for_file"))
HANGS = _stack(Frame("/u/train.py", 30, "hang"))


@dataclass
class World:
    """What the workers do at each time. `groups` are the ranks that train in step with each other; `counts`: they count
    steps. `polls` are the ranks that wait for rank 0 by looking for a file; the others wait in a collective."""

    random: Random
    groups: tuple[range, ...] = ()
    counts: bool = True
    hangs: int | None = None
    polls: frozenset[int] = frozenset()
    pause_at: float = LEARNING
    hangs_at: float = LEARNING
    named: list[tuple[float, int, bool]] = field(default_factory=list)

    @classmethod
    def drawn(cls, seed: int) -> World:
        """The world of a seed."""
        random = Random(seed)
        world = cls(random, random.choice(GROUPS))
        if len(world.groups) == 1:
            world.polls = frozenset(rank for rank in range(1, RANKS) if random.random() < 0.5)
        elif random.random() < 0.7:
            world.hangs = random.randrange(RANKS)
        # Of workers that neither count steps nor communicate nothing shows that they train.
        world.counts = len(world.groups) == RANKS or random.random() < 0.5
        world.hangs_at = LEARNING + random.uniform(0, 10)
        world.pause_at = LEARNING + random.uniform(0, 10)
        return world

    def evaluates(self, now: float) -> bool:
        """Whether rank 0 evaluates."""
        return self.pause_at <= now < self.pause_at + PAUSE and not self.is_hung(0, now)

    def is_hung(self, rank: int, now: float) -> bool:
        """Whether a worker hangs at a time."""
        return rank == self.hangs and now >= self.hangs_at

    def trains(self, rank: int, now: float) -> bool:
        """Whether a worker trains at a time: all of its group do."""
        group = next(group for group in self.groups if rank in group)
        return not any(self.is_hung(one, now) or (one == 0 and self.evaluates(now)) for one in group)

    def stack(self, rank: int, now: float) -> Stack:
        """Where the main thread of a worker is."""
        if self.is_hung(rank, now):
            return HANGS
        return SLEEPS if rank in self.polls else WAITS


def raise_error(name: str, error: Exception) -> None:
    """End the world with an error of a consumer."""
    raise error


class Node:
    """A node, as `watch_round` makes it; it samples a world instead of the kernel, and sends reports to `deliver`."""

    def __init__(self, world: World, place: int, deliver: Callable[[NodeReport], None]) -> None:
        self._world = world
        self._ranks = range(place * PER_NODE, (place + 1) * PER_NODE)
        self._member = PLAN.members[place]
        self._deliver = deliver
        self._done = dict.fromkeys(self._ranks, 0.0)
        self._at = 0.0
        detectors = RoundDetectors(elsewhere=True)
        workers: Any = SimpleNamespace(key=KEY, group=SimpleNamespace(running=[1]))
        pauses = LearnedPauses()
        diagnosis = CoordinatedDiagnosis(KEY, self.report, detectors.witnesses, self._on_stall, lambda _: None, pauses)
        vary = lambda seconds: seconds * world.random.uniform(0.75, 1.25)  # noqa: E731 - one line in one place
        self.tick = Tick(dict, raise_error)
        watch = StallWatch(detectors, Sources(self, self, self._steps), diagnosis, pauses, vary=vary)
        self.stalls = RoundWatch(workers, watch, diagnosis)

    def report(self) -> None:
        """Send a report."""
        self._deliver(self.stalls.add_to_report(running_report(PLAN, self._member)))

    def sample(self, full: bool) -> list[Evidence]:
        now = self._advance()
        found = [self._evidence(rank, now, full) for rank in self._ranks]
        self._traffic = {one.rank: one.traffic for one in found}
        return found

    def repeat(self) -> list[Evidence]:
        now = self._advance()
        return [Evidence(rank, now, self._traffic[rank], repeated=True) for rank in self._ranks]

    def _advance(self) -> float:
        now = asyncio.get_running_loop().time()
        for rank in self._ranks:
            if self._world.trains(rank, now):
                self._done[rank] += now - self._at
        self._at = now
        return now

    def _evidence(self, rank: int, now: float, full: bool) -> Evidence:
        sent = 0 if len(self._world.groups) == RANKS else int(1000 * self._done[rank])
        evaluates = rank == 0 and self._world.evaluates(now)
        faults = int(1e6 * now) if evaluates else 0
        own = ProcessFigures(rank + 9, "python", "S", 1, now if evaluates else 0.0, faults, 0, 0)
        return Evidence(rank, now, Traffic(sent, sent, at_store=True), WorkerFigures(own) if full else None)

    def forget(self, rank: int) -> None: ...

    def close(self) -> None: ...

    async def read(
        self,
        ranks: Iterable[int],
        *,
        main: bool = False,
        times: int = 1,
        enough: Callable[[list[Stack]], bool] | None = None,
    ) -> dict[int, tuple[Stack, ...]]:
        now = asyncio.get_running_loop().time()
        stacks = {rank: self._world.stack(rank, now) for rank in ranks}
        return {rank: (stack,) * times for rank, stack in stacks.items() if stack is not None}

    def _steps(self) -> Mapping[int, int]:
        self._advance()
        return {rank: int(2 * done) for rank, done in self._done.items()} if self._world.counts else {}

    def _on_stall(self, report: StallReport) -> None:
        now = asyncio.get_running_loop().time()
        for rank in report.guilty:
            self._world.named.append((now, rank, report.is_alone))
            if rank != self._world.hangs or now < self._world.hangs_at:
                raise Broken(f"at {now:.1f} s rank {rank} is named, and does not hang: {report.line}")


PLAN = Plan(
    epoch=1,
    phase=PlanPhase.TRAINING,
    key=KEY,
    members=tuple(Member(f"n{place}", "i", f"node-{place}", PER_NODE) for place in range(NODES)),
)


def play(seed: int) -> World:
    """Play the world of a seed. Raises Broken, with the command that repeats it, if a worker is named that does not
    hang, or one that hangs is not."""
    world = World.drawn(seed)
    try:
        run_virtually(_play(world))
        late = [found for found in world.named if found[0] > world.hangs_at + SETTLED]
        if world.hangs is not None and (not world.named or late):
            raise Broken(f"rank {world.hangs} hangs from {world.hangs_at:.1f} s on, and is named: {world.named}")
    except Broken as broken:
        raise Broken(f"seed {seed}: {broken}; see (cd tests && python -m simulation {seed} --stalls)") from None
    return world


async def _play(world: World) -> None:
    loop = asyncio.get_running_loop()
    observer = StallObserver(JobRules(NODES, NODES, parts=(StallRules(watched=1),)))
    plan = PLAN
    received: dict[int, NodeReport] = {}
    broken: list[BaseException] = []
    loop.set_exception_handler(lambda _, context: broken.append(context.get("exception") or Broken(context["message"])))
    arrives = [0.0] * (2 * NODES)

    def send(channel: int, action: Callable[[], None]) -> None:
        """Deliver in order, each after a time of its own: a loop calls what has the same time in any order."""
        after_last = math.nextafter(arrives[channel], math.inf)
        arrives[channel] = max(after_last, loop.time() + world.random.uniform(0, MAX_DELAY))
        loop.call_at(arrives[channel], action)

    def receive(place: int, report: NodeReport) -> None:
        nonlocal plan
        received[place] = report
        if len(received) < NODES:
            return
        known = {one.key: KnownNode(one, 0.0, 0.0) for one in received.values()}
        plan = update_plan(plan, loop.time(), part=observer.observe(plan, known, loop.time()).part)
        parts = observer.orders(plan, rank_assignments(plan))
        for number, node in enumerate(nodes):
            assignment = Assignment(
                epoch=1, phase=PlanPhase.TRAINING, key=KEY, parts=(parts.get(PLAN.members[number].key),)
            )
            send(NODES + number, lambda node=node, assignment=assignment: node.stalls.follow(assignment))

    def deliver_from(place: int) -> Callable[[NodeReport], None]:
        return lambda report: send(place, lambda: receive(place, report))

    nodes = [Node(world, place, deliver_from(place)) for place in range(NODES)]
    for node in nodes:
        node.tick.follow(1, running=True)
        node.stalls.begin(node.tick)
        node.report()
    end = loop.time() + LEARNING + PAUSE + SETTLED
    while loop.time() < end and not broken:
        await asyncio.sleep(1)
    for node in nodes:
        node.stalls.close()
        node.tick.close()
    if broken:
        raise broken[0]
