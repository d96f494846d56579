"""How often a rule names those for whom something was planted, and how often others."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from check_world import Kind, World, check_world, draw_world, most_plants, plant, to_be_told, whole

from node_check_bench.published import named as published

NOTHING, MIXED = "nothing", "mixed, with accidents"
PLANTS = (NOTHING, *(kind.value for kind in Kind), MIXED)

Rule = Callable[[World, int], set[int]]

CPU_SHARE, HALF = 0.02, 0.5
"""The part of the published figure that is computing: as measured on CPUs, and as one that is kind to the rule."""


def _ours(world: World, seed: int) -> set[int]:
    return set(check_world(world, seed).named)


def _published(share: float) -> Rule:
    return lambda world, seed: published(world, random.Random(str(seed)), share)


RULES: dict[str, Rule] = {
    "dlrover-run": _ours,
    "published, 2 % computing": _published(CPU_SHARE),
    "published, 50 % computing": _published(HALF),
}


@dataclass(frozen=True)
class Rate:
    """Of `planted` broken or slow nodes that could be told `hits` were named, and there were `untold` others that
    could not; of `healthy` ones `blamed` were named, which happened in `cases_with_blame` of the `cases`."""

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


def draw(nodes: int, what: str, seed: int) -> World:
    """One world with plants of that name: from one to a third of the nodes."""
    drawn = random.Random(f"{nodes} {what} {seed}")
    if what == NOTHING:
        return whole(nodes)
    if what == MIXED:
        return draw_world(drawn, nodes)
    return plant(nodes, [Kind(what)] * drawn.randint(1, most_plants(nodes)), drawn)


def measure(sizes: Sequence[int], cases: int) -> list[Rate]:
    """The rates of all rules in the same worlds. The rules take other measurements, with the same noise."""
    return [
        _rate(nodes, what, name, [(draw(nodes, what, seed), seed) for seed in range(cases)])
        for nodes in sizes
        for what in PLANTS
        for name in RULES
    ]


def _rate(nodes: int, what: str, name: str, worlds: Sequence[tuple[World, int]]) -> Rate:
    planted = hits = untold = healthy = blamed = cases_with_blame = 0
    for world, seed in worlds:
        named = RULES[name](world, seed)
        bad = to_be_told(world).keys()
        # An accident at the first try leaves a node that has nothing.
        well = {node for node, truth in enumerate(world.nodes) if truth.healthy}
        planted += len(bad)
        hits += len(bad & named)
        untold += len(world.nodes) - len(bad | well)
        healthy += len(well)
        blamed += len(well & named)
        cases_with_blame += bool(well & named)
    return Rate(nodes, what, name, len(worlds), planted, hits, untold, healthy, blamed, cases_with_blame)


def table(rates: Sequence[Rate]) -> list[str]:
    """A Markdown table: for each size and plant one line, with hits and false alarms of each rule."""
    rules = list(dict.fromkeys(rate.rule for rate in rates))
    head = ["nodes", "planted", *(f"{rule}: named" for rule in rules), *(f"{rule}: healthy named" for rule in rules)]
    lines = [_line(head), _line(["---:", "---", *["---:"] * (2 * len(rules))])]
    for nodes, what in dict.fromkeys((rate.nodes, rate.plant) for rate in rates):
        row = {rate.rule: rate for rate in rates if (rate.nodes, rate.plant) == (nodes, what)}
        hits = [_share(row[rule].hits, row[rule].planted) for rule in rules]
        false = [_share(row[rule].cases_with_blame, row[rule].cases) for rule in rules]
        lines.append(_line([str(nodes), what, *hits, *false]))
    return lines


def _share(part: int, whole_number: int) -> str:
    """A percentage; none and all are said only where they are exact, and "-" where there was nothing."""
    if not whole_number:
        return "-"
    if part in (0, whole_number):
        return "0 %" if not part else "100 %"
    return f"{min(max(100 * part / whole_number, 0.1), 99.9):.1f} %"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
