"""A model of the published rule, written from its description: twice the median of the summed time, in two rounds.

Each node's figure is its time at computing and that of a collective of its group, which is the same for all members.
Round 0 has neighbours in pairs, an odd one joins the last. When somebody failed, or took more than twice the median,
there is a second round, with the fastest and the slowest together; the better of the two counts for each node. Three
nodes or fewer all exit at the first suspicion. Stragglers are taken to be excluded, as they are not named otherwise.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterable

from check_world import DISTURBED, SLOW, Computing, World

FAILED = 3600.0
"""Seconds that stand for a failure, as published."""

TOO_FEW = 3
"""Up to so many nodes, all of them exit."""


def named(world: World, drawn: random.Random, share: float) -> set[int]:
    """Who exits. Computing is `share` of the time of a healthy node, the collective is the rest."""
    nodes = range(len(world.nodes))
    times = dict.fromkeys(nodes, FAILED)
    passed: set[int] = set()
    groups = _groups(nodes)
    for turn in range(2):
        for group in groups:
            for node, time in _measure(world, group, drawn, share, turn).items():
                times[node] = min(times[node], time)
                if time < FAILED:
                    passed.add(node)
        median = statistics.median(times.values())
        blamed = {node for node in nodes if node not in passed or times[node] > 2 * median}
        if not blamed:
            return set()
        if len(nodes) <= TOO_FEW:
            return set(nodes)
        groups = _fastest_with_slowest(times)
    return blamed


def _measure(world: World, group: list[int], drawn: random.Random, share: float, turn: int) -> dict[int, float]:
    def off() -> float:
        return drawn.uniform(1 - world.noise, 1 + world.noise)

    slowest_link = 1.0
    collective = off()
    computing = {node: share * world.nodes[node].slower * off() for node in group}
    for node in group:
        kind = world.nodes[node].computing
        if kind is Computing.FAILS or (kind is Computing.FAILS_ONCE and turn == 0):
            return dict.fromkeys(group, FAILED)
        if turn < DISTURBED.get(kind, 0):
            computing[node] *= SLOW[1]
    for one, other in itertools.combinations(group, 2):
        ends = world.nodes[one], world.nodes[other]
        slower = world.links.get((min(one, other), max(one, other)), 1.0)
        # It does not look at results, so a node that computes wrongly takes part as if it were well.
        if not slower or any(end.cut for end in ends):
            return dict.fromkeys(group, FAILED)
        slowest_link = max(slowest_link, slower, *(end.drag for end in ends))
    return {node: computing[node] + (1 - share) * slowest_link * collective for node in group}


def _groups(nodes: Iterable[int]) -> list[list[int]]:
    order = list(nodes)
    groups = [order[at : at + 2] for at in range(0, len(order) - 1, 2)]
    if len(order) % 2:
        groups[-1].append(order[-1])
    return groups


def _fastest_with_slowest(times: dict[int, float]) -> list[list[int]]:
    order = sorted(times, key=lambda node: times[node])
    groups = [[order[at], order[-1 - at]] for at in range(len(order) // 2)]
    if len(order) % 2:
        groups[-1].append(order[len(order) // 2])
    return groups
