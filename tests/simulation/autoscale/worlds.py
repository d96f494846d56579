"""Worlds: a job whose throughput at each size is known, and all that hides it from a rule that has to find the best.

Everything about a world follows from its seed. What a rule sees is what nodes report: steps, and when they were made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from random import Random

from dlrover_run.features.autoscale.model import Sizes

KINDS = ("linear", "amdahl", "knee", "decline", "flat")
TROUBLES = ("none", "none", "missing", "flapping", "crash")
HOUR = 3600.0


@dataclass(frozen=True)
class Curve:
    """The work per second of a job with n nodes, as a multiple of that with one."""

    kind: str
    knee: float = 1.0
    serial: float = 0.0
    crosstalk: float = 0.0

    def __call__(self, size: int) -> float:
        if self.kind == "flat":
            return 1.0
        if self.kind == "knee":
            # Linear up to the knee, and nearly flat beyond it.
            return min(size, self.knee) * (size / self.knee) ** 0.05 if size > self.knee else float(size)
        return size / (1 + self.serial * (size - 1) + self.crosstalk * size * (size - 1))


@dataclass(frozen=True)
class World:
    """One job. `step` is the seconds of a step with the fewest nodes, `noise` the standard deviation of the logarithm
    of the speed over ten seconds, and `correlation` that of successive ones. A share `outliers` of the time runs ten
    times slower. Between two rounds `pause` seconds pass. `here` nodes are here for good, and `most_here` during half
    of each `period` seconds. With `failing` sizes the workers fail, and at `fails_at` a worker fails once. `taken_over`
    is how often a new coordinator takes over per hour, and at `lost_at` one begins without a journal. With `tells_end`
    the script says how long it will train."""

    curve: Curve
    sizes: Sizes
    start: int
    here: int
    hours: float = 12.0
    strong: bool = False
    samples: bool = False
    step: float = 0.2
    noise: float = 0.0
    correlation: float = 0.0
    outliers: float = 0.0
    pause: float = 10.0
    drift: float = 0.0
    drift_hours: float = 6.0
    jump: float = 0.0
    jump_at: float = math.inf
    most_here: int = 0
    period: float = 1200.0
    failing: frozenset[int] = field(default_factory=frozenset)
    taken_over: float = 0.0
    lost_at: float = math.inf
    fails_at: float = math.inf
    tells_end: bool = False
    seed: int = 0
    kind: str = ""
    trouble: str = "none"

    def speed(self, size: int, at: float) -> float:
        """The true work per second at that time."""
        factor = math.exp(self.drift * math.sin(2 * math.pi * at / (self.drift_hours * HOUR)))
        return self.curve(size) * factor * math.exp(self.jump if at >= self.jump_at else 0.0)

    def step_seconds(self, size: int, at: float) -> float:
        """The true seconds of a step: each worker keeps its batch, or the batch of the job is divided."""
        first = self.sizes.fewest
        batch = 1.0 if self.strong else size / first
        return self.step * batch * self.curve(first) / self.speed(size, at)

    def present(self, at: float) -> int:
        """How many nodes are here at that time."""
        if self.most_here <= self.here or at % self.period >= self.period / 2:
            return self.here
        return self.most_here

    def utility(self, size: int, efficiency: float) -> float:
        """The true utility of a size; 0 without a round."""
        return self.curve(size) / size**efficiency if size else 0.0

    def best(self, efficiency: float) -> int:
        """The size with the greatest utility among those that can be had."""
        most = min(self.sizes.most, self.here)
        choice = range(self.sizes.fewest, most + 1, self.sizes.unit)
        return max((size for size in choice if size not in self.failing), key=lambda n: self.utility(n, efficiency))


def stationary(world: World, hours: float) -> World:
    """The world without drift, jumps and restarts of the coordinator without a journal."""
    return replace(world, hours=hours, drift=0.0, jump=0.0, lost_at=math.inf)


def draw(seed: int) -> World:
    """The world of that seed."""
    random = Random(f"autoscale {seed}")
    unit = random.choice((1, 1, 1, 2, 4))
    most = random.choice((2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64))
    fewest = 1 if random.random() < 0.7 else random.randint(1, max(1, most // 2))
    sizes = Sizes(fewest * unit, most * unit, unit)
    kind = random.choice(KINDS)
    peak = math.exp(random.uniform(0, math.log(most * unit * 1.5)))
    curve = {
        "linear": Curve("linear", serial=random.choice((0.0, 0.002))),
        "amdahl": Curve("amdahl", serial=1 / (1 + peak)),
        "knee": Curve("knee", knee=peak),
        "decline": Curve("decline", serial=0.3 / peak, crosstalk=1 / peak**2),
        "flat": Curve("flat"),
    }[kind]
    trouble = random.choice(TROUBLES)
    all_sizes = range(sizes.fewest, sizes.most + 1, unit)
    start = random.choice((sizes.fewest, sizes.fewest, sizes.most, random.choice(all_sizes)))
    # Some clusters have more nodes than the job may use.
    here, most_here = sizes.most * random.choice((1, 2)), 0
    failing: frozenset[int] = frozenset()
    if trouble in ("missing", "flapping"):
        here = random.choice(all_sizes)
        start = min(start, here)
    if trouble == "flapping":
        most_here = min(sizes.most, here + unit * random.randint(1, max(1, most // 2)))
    if trouble == "crash":
        limit = random.choice(all_sizes)
        too_many = {size for size in all_sizes if size > max(limit, start)}
        too_few = {size for size in all_sizes if size < min(limit, start)}
        single = {size for size in (limit,) if size != start}
        failing = frozenset(random.choice((too_many, too_few, single)))
    noise = math.exp(random.uniform(math.log(0.01), math.log(0.3)))
    hours = 12.0
    return World(
        curve=curve,
        sizes=sizes,
        start=start,
        here=here,
        hours=hours,
        strong=random.random() < 0.4,
        samples=random.random() < 0.3,
        step=math.exp(random.uniform(math.log(0.05), math.log(5))),
        noise=noise,
        correlation=random.choice((0.0, 0.4, 0.8)),
        outliers=random.choice((0.0, 0.05)),
        pause=math.exp(random.uniform(0, math.log(300))),
        drift=random.choice((0.0, 0.0, random.uniform(0, 0.2))),
        drift_hours=random.uniform(4, 24),
        jump=random.choice((0.0, 0.0, 0.0, random.uniform(-0.5, 0.5))),
        jump_at=random.uniform(0, hours / 2) * HOUR,
        most_here=most_here,
        period=random.uniform(300, 3600),
        failing=failing,
        taken_over=random.choice((0.0, 2.0)),
        lost_at=random.uniform(0, hours / 2) * HOUR if random.random() < 0.1 else math.inf,
        seed=seed,
        kind=kind,
        trouble=trouble,
    )
