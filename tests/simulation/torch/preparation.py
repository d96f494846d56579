"""Nodes that prepare before they take part: the product's `Starter`, whose template imports in virtual time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn, cast

from msgspec.structs import replace

from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.spec import JobSpec
from dlrover_run.workers import template_client
from dlrover_run.workers.starter import Starter
from dlrover_run.workers.template_client import Imported, TemplateError
from simulation.network import TO_MASTER, TO_NODE
from simulation.nodes import Node
from simulation.timeline import demand

if TYPE_CHECKING:
    from simulation.scenario import Scenario
    from simulation.torch.nodes import TorchNode

LONGEST = 300.0
"""Seconds after which a template that imports for ever is given up. The product's own limit may be a planted defect."""

REACTION = 1.0
"""Seconds within which an agent reports that it is ready, and a coordinator acts on that."""


@dataclass(frozen=True)
class Draw:
    """How long the template of a node imports, at first and before each further round; it `dies` at the end of the
    first. `accident` is what happens to the node within that time, after the part `at` of it."""

    seconds: float
    learns: float
    dies: bool
    accident: str
    at: float


class Preparation:
    """The templates of all nodes of a run, if they prepare (`is_here`), from a generator of its own."""

    def __init__(self, scenario: Scenario, seed: int, is_here: bool) -> None:
        self._scenario = scenario
        self._seed = seed
        self._random = Random(f"preparing {seed}")
        self.is_here = is_here
        self.accidents = 0
        self.given_up = 0

    def rules(self, rules: JobRules) -> JobRules:
        """The rules of the job: in more runs than else, a round waits for further newcomers."""
        if not self.is_here:
            return rules
        return replace(rules, scale_up_delay=self._random.choice((rules.scale_up_delay, 3.0, 10.0)))

    @property
    def longest(self) -> float:
        """The seconds by which workers may come later than in a run in which no node prepares."""
        return LONGEST + REACTION if self.is_here else 0.0

    def draw(self, node: Node) -> Draw:
        """Draw for one process, whatever happened to others before."""
        random = Random(f"preparing {self._seed} {node.key}")
        seconds = random.choice((0.2, 2.0, 2.0, 8.0, 20.0, random.uniform(0, 60), math.inf))
        kinds = ("kill", "go", "cut", "break", "master") if random.random() < 0.3 else ("",)
        learns = random.choice((0.0, 0.0, 2.0))
        return Draw(seconds, learns, random.random() < 0.15, random.choice(kinds), random.random())

    def befall(self, node: Node, draw: Draw, is_preparing: Callable[[], bool]) -> None:
        """Let the accident of a node happen while it prepares."""
        scenario = self._scenario
        if not draw.accident or (scenario.trouble == "gentle" and draw.accident in ("cut", "master")):
            return

        def happen() -> None:
            if not scenario.faults.over and node.alive and is_preparing():
                self.accidents += 1
                self._happen(node, draw.accident)

        scenario.timeline.after(draw.at * min(draw.seconds, 30.0), happen)

    def _happen(self, node: Node, accident: str) -> None:
        scenario = self._scenario
        if accident == "kill":
            scenario.invariants.nodes_stay = False
            node.kill()
        elif accident == "go":
            scenario.invariants.nodes_stay = False
            node.ask_to_go()
        elif accident == "cut":
            scenario.invariants.nodes_stay = False
            for direction in (TO_MASTER, TO_NODE):
                node.link.hold(direction)
            scenario.timeline.after(self._random.choice((1.0, 10.0, 40.0)), node.link.heal)
        elif accident == "break":
            node.rendezvous.cut()
        else:
            scenario.faults.lose_coordinator()


class SlowTemplate:
    """The stand-in for `Template`: it imports as long as its node has drawn, and forks nothing."""

    def __init__(self, node: TorchNode) -> None:
        self._draw = node.draw
        self._preparation = node.preparation
        self._note_ready = node.note_ready
        self.closed: asyncio.Future[None] = node.create_future()

    @classmethod
    def start(cls, *given: object) -> SlowTemplate:
        return cls(cast(Any, asyncio.get_running_loop()))

    async def prepare(self, *given: object) -> Imported:
        try:
            return await self._import()
        finally:
            self._note_ready()

    async def _import(self) -> Imported:
        try:
            async with asyncio.timeout(template_client.PREPARE_TIMEOUT):
                await asyncio.sleep(self._draw.seconds)
        except TimeoutError:
            self._preparation.given_up += 1
            self._end(f"the template did not answer within {template_client.PREPARE_TIMEOUT:g} seconds")
        if self._draw.dies:
            self._end("the template was killed by SIGKILL")
        return Imported((), ())

    async def learn(self, goes_on: bool = False) -> Imported:
        await asyncio.sleep(self._draw.learns)
        return Imported((), ())

    async def fork(self, *given: object) -> NoReturn:
        raise AssertionError("workers are simulated without processes")

    async def close(self) -> None:
        await asyncio.sleep(0)

    def _end(self, sentence: str) -> NoReturn:
        if not self.closed.done():
            self.closed.set_result(None)
        raise TemplateError(sentence)


def start_preparing(node: Node, spec: JobSpec, on_ready: Callable[[], None]) -> Starter:
    """The starter of a node, which has begun to prepare."""
    starter = Starter(replace(spec, start_method="forkserver"), node.note)
    starter.prestart({}, on_ready)
    return starter


def watch_report(node: Node, seconds: float, is_reported: Callable[[], bool], invariant: str) -> None:
    """Demand the invariant that the node does not report any more after so many seconds that it prepares. The time for
    which it was stopped does not count."""
    due = node.timeline.now + seconds

    def check() -> None:
        if node.timeline.now > due + REACTION:
            watch_report(node, REACTION, is_reported, invariant)
        else:
            demand(node.left or node.is_leaving or not is_reported(), invariant)

    node.call_later(seconds, check)
