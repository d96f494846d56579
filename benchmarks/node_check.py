"""Which nodes the node check names in simulated worlds, and which the published rule would. See `benchmarks/README.md`.

The published rule is a model that was written from its description: each node has one figure, its time at computing
plus that of a collective of its group. In the first round neighbours are paired, and an odd node joins the last pair.
If a node failed or took more than twice the median, a second round pairs the fastest with the slowest; the better of
the two rounds counts. Three nodes or fewer all exit at the first suspicion. Stragglers count as excluded.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# The simulated worlds are those of the tests, so the table shows what the tests require.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from core.report import Table
from core.series import Kept, Series, measured
from support.check_world import (
    DISTURBED,
    SLOW,
    Computing,
    Kind,
    World,
    check_world,
    draw_world,
    expected_statuses,
    max_plants,
    plant,
    whole,
)

SIZES = (2, 3, 4, 5, 8, 16, 32, 64)
WORLDS = 300
NOTHING, MIXED = "nothing", "mixed, with accidents"
PLANTS = (NOTHING, *(kind.value for kind in Kind), MIXED)

FAILED = 3600.0
"""Seconds that stand for a failure, as published."""

TOO_FEW = 3
"""Up to this number of nodes, all of them exit."""

CPU_SHARE, HALF = 0.02, 0.5
"""The share of computing in the published figure: as measured on CPUs, and one that favours the rule."""


def published(world: World, drawn: random.Random, share: float) -> set[int]:
    """The nodes that exit under the published rule; `share` of the time of a healthy node is computing."""
    nodes = range(len(world.nodes))
    times = dict.fromkeys(nodes, FAILED)
    groups = _neighbours(list(nodes))
    for turn in range(2):
        for group in groups:
            for node, time in _measure(world, group, drawn, share, turn).items():
                times[node] = min(times[node], time)
        median = statistics.median(times.values())
        blamed = {node for node in nodes if times[node] >= FAILED or times[node] > 2 * median}
        if not blamed:
            return set()
        if len(nodes) <= TOO_FEW:
            return set(nodes)
        groups = _fastest_with_slowest(times)
    return blamed


def _measure(world: World, group: list[int], drawn: random.Random, share: float, turn: int) -> dict[int, float]:
    def noise() -> float:
        return drawn.uniform(1 - world.noise, 1 + world.noise)

    slowest_link = 1.0
    collective = noise()
    computing = {node: share * world.nodes[node].slower * noise() for node in group}
    for node in group:
        kind = world.nodes[node].computing
        if kind is Computing.FAILS or (kind is Computing.FAILS_ONCE and turn == 0):
            return dict.fromkeys(group, FAILED)
        if turn < DISTURBED.get(kind, 0):
            computing[node] *= SLOW[1]
    for one, other in itertools.combinations(group, 2):
        ends = world.nodes[one], world.nodes[other]
        slower = world.links.get((min(one, other), max(one, other)), 1.0)
        # It does not compare results, so a node that computes wrongly takes part like a healthy one.
        if not slower or any(end.cut for end in ends):
            return dict.fromkeys(group, FAILED)
        slowest_link = max(slowest_link, slower, *(end.drag for end in ends))
    return {node: computing[node] + (1 - share) * slowest_link * collective for node in group}


def _neighbours(order: list[int]) -> list[list[int]]:
    groups = [order[at : at + 2] for at in range(0, len(order) - 1, 2)]
    if len(order) % 2:
        groups[-1].append(order[-1])
    return groups


def _fastest_with_slowest(times: dict[int, float]) -> list[list[int]]:
    order = sorted(times, key=lambda node: times[node])
    return _neighbours([order[-1 - at // 2] if at % 2 else order[at // 2] for at in range(len(order))])


RULES: dict[str, Callable[[World, int], set[int]]] = {
    "dlrover-run": lambda world, seed: set(check_world(world, seed).named),
    "published, 2 % computing": lambda world, seed: published(world, random.Random(str(seed)), CPU_SHARE),
    "published, 50 % computing": lambda world, seed: published(world, random.Random(str(seed)), HALF),
}


@dataclass(frozen=True)
class Rate:
    """Of `planted` bad nodes that can be identified, `hits` were named; `untold` others cannot be identified. Of
    `healthy` ones, `blamed` were named, in `cases_with_blame` of the `cases`."""

    nodes: int
    plant: str
    rule: str
    cases: int
    planted: int
    hits: int
    untold: int
    healthy: int
    blamed: int
    cases_with_blame: int


def draw(nodes: int, planted: str, seed: int) -> World:
    """A world in which one to a third of the nodes have the planted defect."""
    drawn = random.Random(f"{nodes} {planted} {seed}")
    if planted == NOTHING:
        return whole(nodes)
    if planted == MIXED:
        return draw_world(drawn, nodes)
    return plant(nodes, [Kind(planted)] * drawn.randint(1, max_plants(nodes)), drawn)


class Key(NamedTuple):
    """A row: worlds of one size in which one defect was planted, and how many of them."""

    nodes: int
    plant: str
    cases: int


@dataclass(frozen=True)
class Rates:
    """The rates of all rules in the same worlds."""

    key: Key
    rates: Sequence[Rate]


def measure(key: Key) -> Rates:
    """The rates of all rules. Each rule takes its own measurements, with the same noise."""
    worlds = [(draw(key.nodes, key.plant, seed), seed) for seed in range(key.cases)]
    return Rates(key, [rate(key.nodes, key.plant, rule, worlds) for rule in RULES])


def rate(nodes: int, planted: str, rule: str, worlds: Sequence[tuple[World, int]]) -> Rate:
    """The rate of one rule."""
    identifiable = hits = untold = healthy = blamed = cases_with_blame = 0
    for world, seed in worlds:
        named = RULES[rule](world, seed)
        bad = expected_statuses(world).keys()
        # A node with an accident at its first try is healthy.
        well = {node for node, truth in enumerate(world.nodes) if truth.healthy}
        identifiable += len(bad)
        hits += len(bad & named)
        untold += len(world.nodes) - len(bad | well)
        healthy += len(well)
        blamed += len(well & named)
        cases_with_blame += bool(well & named)
    return Rate(nodes, planted, rule, len(worlds), identifiable, hits, untold, healthy, blamed, cases_with_blame)


def cells(rates: Sequence[Rate]) -> list[list[str]]:
    """A row for each size and plant, with the hits and the false alarms of each rule."""
    rows = []
    for nodes, planted in dict.fromkeys((rate.nodes, rate.plant) for rate in rates):
        row = [rate for rate in rates if (rate.nodes, rate.plant) == (nodes, planted)]
        hits = [percent(rate.hits, rate.planted) for rate in row]
        rows.append([str(nodes), planted, *hits, *(percent(rate.cases_with_blame, rate.cases) for rate in row)])
    return rows


def percent(part: int, total: int) -> str:
    """A percentage; 0 and 100 only if they are exact, and "-" of nothing."""
    if not total:
        return "-"
    if part in (0, total):
        return "100 %" if part else "0 %"
    return f"{min(max(100 * part / total, 0.1), 99.9):.1f} %"


HEAD = ("nodes", "planted", *(f"{rule}: named" for rule in RULES), *(f"{rule}: healthy named" for rule in RULES))


def tables(kept: Sequence[Kept[Rates]]) -> list[Table]:
    """A table for each number of worlds, its rows in the order of the plants."""
    found = []
    for cases in sorted({one.run.key.cases for one in kept}):
        own = [one for one in kept if one.run.key.cases == cases]
        ordered = sorted(own, key=lambda one: (one.run.key.nodes, PLANTS.index(one.run.key.plant)))
        how = measured(own, f"{cases} simulated worlds for each row")
        rows = cells([each for one in ordered for each in one.run.rates])
        found.append(Table(f"{cases} worlds", how, HEAD, rows, text=(1,)))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the worlds, and apply the rules; return 0."""
    parser = argparse.ArgumentParser(description="Which nodes the node check names in simulated worlds.")
    parser.add_argument("--cases", type=int, default=WORLDS, help="worlds for each row (default: %(default)s)")
    parser.add_argument("--nodes", type=int, nargs="+", default=SIZES, help="numbers of nodes (default: 2 to 64)")
    SERIES.add_options(parser)
    options = parser.parse_args(arguments)
    if options.cases < 1 or min(options.nodes) < 2:
        parser.error("--cases must be at least 1, and --nodes at least 2")
    wanted = [Key(nodes, planted, options.cases) for nodes in sorted(set(options.nodes)) for planted in PLANTS]
    return SERIES.run(parser, options, wanted)


SERIES = Series(
    "Node check: the nodes it names",
    "node-check/rates",
    Rates,
    measure,
    tables,
    lambda one: " | ".join(cells(one.rates)[0]),
)

if __name__ == "__main__":
    sys.exit(main())
