"""Jobs with a planted cause, whose rounds the pure decision of experiments changes, or not. No process, no clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from dlrover_run.features.experiments.advise import Advice, Possible, Verdict, advise
from dlrover_run.features.experiments.kinds import Kind
from dlrover_run.features.experiments.model import AT_ONCE, Alike, Cause, Change, Passed, Trial

GPUS = 4
STEPS = 2000
SAVED_EVERY = 100
RESTART = 90.0
"""Seconds of a restart; a step takes one."""

MISREPORTED = 0.02
"""How often another worker is seen to fail first."""


class Failing(NamedTuple):
    """What a fault does in a round: at which step, at which rank, and who fails with it."""

    step: float
    rank: int
    alike: Alike = Alike.ONE
    kind: Kind | None = None


class Place(NamedTuple):
    rank: int
    node: str
    device: str


class Round(NamedTuple):
    """What a fault sees of a round."""

    number: int
    start: int
    places: Sequence[Place]
    random: random.Random

    def of_node(self, node: str) -> list[Place]:
        return [place for place in self.places if place.node == node]


Fault = Callable[[Round], Failing | None]


class Planted(NamedTuple):
    """A fault, how its failure is seen, and whether a verdict names it: True, False, or "coarse" for the node of a
    GPU."""

    name: str
    fault: Fault
    kind: Kind
    named_by: Callable[[Verdict], bool | str]


@dataclass
class Outcome:
    verdicts: list[bool | str] = field(default_factory=list)
    restarts: int = 0
    finished: bool = False
    seconds: float = 0.0
    changes: int = 0


def kind(name: str, error: str = "RuntimeError") -> Kind:
    return Kind(f"{random.Random(name).getrandbits(64):016x}", "exception", error, "train.py:1 in step")


def places_of(nodes: Sequence[str], orders: dict[str, list[int]]) -> list[Place]:
    return [
        Place(rank * GPUS + local, node, f"GPU {orders.get(node, range(GPUS))[local]}")
        for rank, node in enumerate(nodes)
        for local in range(GPUS)
    ]


def run_job(planted: Sequence[Planted], size: int, budget: int, seed: str, experiments: bool) -> Outcome:
    """A job of `size` nodes that may restart `budget` times."""
    chance = random.Random(seed)
    reports_steps = chance.random() < 0.5
    nodes, orders = [f"node-{n}" for n in range(size)], dict[str, list[int]]()
    trials: list[Trial] = []
    passes: list[Passed] = []
    saved: list[int] = [0]
    before: int | None = None
    found = Outcome()
    spares = 0

    def judge(possible: Possible) -> Advice:
        nonlocal spares, before
        # Who failed with the last one is known once all of its workers have ended.
        known = [*trials[:-1], replace(trials[-1], alike=None)] if passes == [] else trials
        advice = advise(known, passes, possible)
        if advice.verdict is not None:
            right = [each.named_by(advice.verdict) for each in planted]
            found.verdicts.append(next((value for value in right if value), False))
            if advice.verdict.removes in nodes:
                spares += 1
                nodes[nodes.index(advice.verdict.removes)] = f"spare-{spares}"
            passes.clear()
            trials.clear()
        return advice

    for number in range(1, budget + 2):
        start = max(step for step in saved if before is None or step < before)
        places = places_of(nodes, orders)
        chance = random.Random(f"{seed} {number}")
        this = Round(number, start, places, chance)
        failing = [(fails, each) for each in planted if (fails := each.fault(this)) is not None and fails.step < STEPS]
        fails, cause = min(failing, key=lambda pair: pair[0].step, default=(None, None))
        reached = STEPS if fails is None else int(fails.step)
        saved += [step for step in range(SAVED_EVERY, reached + 1, SAVED_EVERY) if step > start]
        found.seconds += reached - start
        last = trials[-1] if trials else None
        if (
            experiments
            and reports_steps
            and last is not None
            and last.step is not None
            and reached > last.step + AT_ONCE
        ):
            passes.append(Passed(round=number, kind=last.kind, resumed=start))
            judge(Possible(checkpoint=True))
        if fails is None or cause is None:
            found.finished = True
            return found
        before = None
        if chance.random() < MISREPORTED:
            fails = fails._replace(rank=chance.randrange(len(places)), alike=Alike.ONE)
        rank = fails.rank
        place = places[rank]
        if number > budget:
            return found
        trials.append(
            Trial(
                round=number, kind=fails.kind or cause.kind, rank=rank, local_rank=rank % GPUS, node=place.node,
                host=place.node, device=place.device, workers=len(places), local=GPUS, alike=fails.alike,
                depth=reached - start if reports_steps else None, resumed=start if reports_steps else None,
            )
        )  # fmt: skip
        if experiments:
            # From the first checkpoint the way back is the begin.
            older = reports_steps and start > SAVED_EVERY
            advice = judge(Possible(devices=True, nodes=size > 1, checkpoint=older))
            if advice.verdict is not None and advice.verdict.stops:
                return found
            if advice.verdict is not None and advice.verdict.suspect.cause is Cause.CHECKPOINT:
                before = advice.verdict.suspect.number
            found.changes += advice.change is not None
            match advice.change:
                case Change.DEVICES:
                    order, one = orders.setdefault(place.node, [*range(GPUS)]), rank % GPUS
                    order[one], order[(one + 1) % GPUS] = order[(one + 1) % GPUS], order[one]
                case Change.NODES:
                    here = nodes.index(place.node)
                    there = (here + 1 + number % (size - 1)) % size
                    nodes[here], nodes[there] = nodes[there], nodes[here]
                case Change.CHECKPOINT:
                    before = start
        found.restarts += 1
        found.seconds += RESTART
    return found


def _when(this: Round, at_once: bool) -> float:
    return this.start + (this.random.randrange(3) if at_once else this.random.expovariate(1 / 300))


def gpu(chance: random.Random, size: int) -> Planted:
    node, device, at_once = f"node-{chance.randrange(size)}", f"GPU {chance.randrange(GPUS)}", chance.random() < 0.5

    def fault(this: Round) -> Failing | None:
        users = [place.rank for place in this.of_node(node) if place.device == device]
        return Failing(_when(this, at_once), users[0]) if users else None

    def named(verdict: Verdict) -> bool | str:
        suspect = verdict.suspect
        if suspect.cause is Cause.NODE and suspect.node == node:
            return "coarse"
        return (suspect.cause, suspect.node, suspect.device) == (Cause.GPU, node, device)

    return Planted("gpu", fault, kind("gpu"), named)


def node(chance: random.Random, size: int) -> Planted:
    name, at_once, fixed = f"node-{chance.randrange(size)}", chance.random() < 0.5, chance.random() < 0.3
    local, together = chance.randrange(GPUS), chance.random() < 0.3

    def fault(this: Round) -> Failing | None:
        users = this.of_node(name)
        place = users[local] if fixed and users else this.random.choice(users) if users else None
        alike = Alike.NODE if together and this.random.random() < 0.8 else Alike.ONE
        return None if place is None else Failing(_when(this, at_once), place.rank, alike)

    return Planted("node", fault, kind("node"), lambda v: v.suspect.cause is Cause.NODE and v.suspect.node == name)


def data(chance: random.Random, size: int) -> Planted:
    rank, step = chance.randrange(size * GPUS), chance.choice([0, 1, chance.randrange(STEPS), chance.randrange(STEPS)])

    def fault(this: Round) -> Failing | None:
        return Failing(step, rank) if this.start <= step else None

    def named(verdict: Verdict) -> bool | str:
        if verdict.suspect.cause is Cause.RANK and verdict.suspect.number == rank:
            return not verdict.perhaps or "coarse"
        return verdict.stops and Cause.RANK in verdict.perhaps and "coarse"

    return Planted("data", fault, kind("data"), named)


def checkpoint(chance: random.Random, size: int) -> Planted:
    number, later = SAVED_EVERY * chance.randrange(2, 15), chance.choice([0, 1, 40])
    fixed, together, itself = chance.randrange(size * GPUS), chance.random() < 0.4, chance.random() < 0.5

    def fault(this: Round) -> Failing | None:
        rank = fixed if fixed % 2 else this.random.randrange(size * GPUS)
        alike = this.random.choice([Alike.NODE, Alike.NODES]) if together else Alike.ONE
        if this.start == number or (this.number == 1 and itself):
            return Failing(number + later, rank, alike)
        # Another failure first, after which the checkpoint is the newest one.
        return Failing(number + 50, rank, kind=kind("another")) if this.number == 1 else None

    def named(verdict: Verdict) -> bool | str:
        if verdict.stops:
            return Cause.CHECKPOINT in (verdict.suspect.cause, *verdict.perhaps) and "coarse"
        return verdict.suspect.cause is Cause.CHECKPOINT and verdict.suspect.number == number

    return Planted("checkpoint", fault, kind("checkpoint"), named)


def code(chance: random.Random, size: int) -> Planted:
    step, only_first = chance.choice([0, 2, chance.randrange(STEPS)]), chance.random() < 0.3
    fast, alone = chance.randrange(size * GPUS), chance.random() < 0.3

    def fault(this: Round) -> Failing | None:
        if this.start > step:
            return None
        if only_first:
            return Failing(step, 0)
        # The node that is nearest to the coordinator may report first each time.
        rank = fast if alone else this.random.randrange(size * GPUS)
        alike = this.random.choices([Alike.ONE, Alike.NODE, Alike.NODES if size > 1 else Alike.NODE], [2, 3, 5])[0]
        return Failing(step, rank, alike)

    def named(verdict: Verdict) -> bool | str:
        if verdict.suspect.cause is Cause.CODE:
            return not verdict.perhaps or "coarse"
        # Code that fails on one rank only is seen as its data: the text names both.
        return verdict.stops and (verdict.suspect.cause is Cause.RANK or Cause.CODE in verdict.perhaps) and "coarse"

    return Planted("code", fault, kind("code"), named)


def flaky(chance: random.Random, size: int) -> Planted:
    at_once = chance.random() < 0.5

    def fault(this: Round) -> Failing | None:
        if this.random.random() >= 1 / 3:
            return None
        step = this.start + (this.random.randrange(3) if at_once else this.random.randrange(STEPS - this.start))
        return Failing(step, this.random.randrange(size * GPUS))

    return Planted("flaky", fault, kind("flaky"), lambda verdict: False)


def outage(chance: random.Random, size: int) -> Planted:
    """Something that all workers need is away for some rounds: they fail alike, at once."""
    rounds, error = chance.randrange(2, 6), chance.choice(["OSError", "RuntimeError"])

    def fault(this: Round) -> Failing | None:
        alike = Alike.NODES if size > 1 else Alike.NODE
        return Failing(this.start, this.random.randrange(size * GPUS), alike) if this.number <= rounds else None

    return Planted("outage", fault, kind("outage", error), lambda verdict: False)


CAUSES: dict[str, Callable[[random.Random, int], Planted]] = {
    each.__name__: each for each in (gpu, node, data, checkpoint, code, flaky, outage)
}


def planted_job(causes: Sequence[str], size: int, budget: int, seed: int, experiments: bool) -> Outcome:
    """A job with these causes; the same seed plants the same ones. Two of them look the same in half of the jobs."""
    chance = random.Random(f"{causes} {size} {seed}")
    planted = [CAUSES[name](chance, size) for name in causes]
    if chance.random() < 0.5:
        planted = [each._replace(kind=planted[0].kind) for each in planted]
    return run_job(planted, size, budget, f"{causes} {size} {seed} run", experiments)
