"""What the facts of a node check come to, node by node and link by link, before a diagnosis uses them.

Facts about nodes that are gone count for nothing, and neither do links with one that cannot compute: its own fault
shows nothing of the other end.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

import msgspec

from dlrover_run.features.node_check.decision.model import CPU, ComputeFact, NodeCheck

Pair = tuple[int, int]
"""Two checked nodes, the lower place first."""

MAX_FAILURES = 2
"""Failures at computing that make a fault: the first may have been an accident."""

CPU_TRIES = 2
"""Tries in a row on the CPU after which a node counts as one that has lost its accelerator: a driver may fail to answer
once."""

Kind = tuple[int, str]
"""What the speed at computing depends on: the number of workers, and the name of the device."""


class Evidence(msgspec.Struct, frozen=True):
    """`tries` at computing of each checked node that is present. `broken` are those that computed wrongly or failed too
    often, and those of `lost_accelerator`, which have lost their accelerator: the one that most of the others have is
    named. `unproven` are those that have failed, and not computed yet, or have computed on the CPU for the first time
    where the others have an accelerator: they compute again, and link after that.

    `device_kinds` is what each of them computes with; where the device is not known it is the one that most others
    have.

    `links` has, for each node that may link, the speed in GB/s of its link with each other one that it has linked with,
    None where no try at it worked. `internal_links` is the same for its link within itself, one entry for each try.
    `link_tries` is how often the link of two has been tried.
    """

    check: NodeCheck
    tries: Mapping[int, tuple[ComputeFact, ...]]
    broken: frozenset[int]
    lost_accelerator: Mapping[int, str]
    unproven: frozenset[int]
    device_kinds: Mapping[int, Kind]
    links: Mapping[int, Mapping[int, float | None]]
    internal_links: Mapping[int, tuple[float | None, ...]]
    link_tries: Counter[Pair]

    def computes_at(self, node: int) -> float | None:
        """Its best TFLOP/s, None when it has not computed: a node may be disturbed, but is never quicker than it is."""
        best = _best(self.tries.get(node, ()))
        return None if best is None else best.tflops

    def works(self, node: int) -> bool:
        return any(speed is not None for speed in self.links.get(node, {}).values())

    def failed_within(self, node: int) -> int:
        """How often its link within itself was tried, if no try worked; else 0."""
        tries = self.internal_links.get(node, ())
        return 0 if any(speed is not None for speed in tries) else len(tries)

    def was_confirmed(self, one: int, other: int) -> bool:
        return self.link_tries[min(one, other), max(one, other)] > 1

    def best_link(self, node: int) -> float | None:
        """The quickest of its links, the one within it where it has no other."""
        speeds = [*self.links.get(node, {}).values(), *self.internal_links.get(node, ())]
        return max((speed for speed in speeds if speed is not None), default=None)

    def comparison_group(self, node: int) -> int:
        """What the speed of its links may be compared by: a link with more ranks is another task. Nodes with other
        numbers of workers also share their cores and cards among more or fewer processes when they compute."""
        return self.check.nodes[node].workers

    def are_comparable(self, one: int, other: int) -> bool:
        """Whether both are of one comparison group."""
        return self.comparison_group(one) == self.comparison_group(other)

    def best_in_group(self, node: int, but: int | None = None) -> float | None:
        """The quickest of its links with nodes that have as many workers, without the link with `but`."""
        speeds = (
            speed
            for other, speed in self.links.get(node, {}).items()
            if speed is not None and other != but and self.are_comparable(other, node)
        )
        return max(speeds, default=None)

    def working_in_group(self, node: int) -> int:
        """How many of its links with nodes that have as many workers do work."""
        met = self.links.get(node, {}).items()
        return sum(speed is not None and self.are_comparable(other, node) for other, speed in met)


def collect_evidence(check: NodeCheck) -> Evidence:
    present = [node for node, checked in enumerate(check.nodes) if checked.is_here]
    tries: dict[int, list[ComputeFact]] = {node: [] for node in present}
    for fact in check.compute_facts:
        if fact.node in tries:
            tries[fact.node].append(fact)
    failures = {node: sum(bool(fact.problem) for fact in facts) for node, facts in tries.items()}
    broken = {
        node for node, facts in tries.items() if failures[node] >= MAX_FAILURES or any(fact.wrong for fact in facts)
    }
    on_cpu = _find_on_cpu(check, tries)
    lost = {node: device for node, device in on_cpu.items() if _last_tries_on_cpu(tries[node]) >= CPU_TRIES}
    broken |= lost.keys()
    unproven = {node for node, facts in tries.items() if facts and failures[node] == len(facts)}
    unproven = (unproven | on_cpu.keys()) - broken
    links: dict[int, dict[int, float | None]] = {node: {} for node in present if node not in broken}
    within: dict[int, list[float | None]] = {node: [] for node in links}
    linked = Counter[Pair]()
    for link in check.link_facts:
        if link.one not in links or link.other not in links:
            continue
        speed = None if link.problem else link.gigabytes
        if link.one == link.other:
            within[link.one].append(speed)
            continue
        linked[link.ends] += 1
        known = links[link.one].get(link.other)
        best = max((s for s in (known, speed) if s is not None), default=None)
        links[link.one][link.other] = links[link.other][link.one] = best
    return Evidence(
        check=check,
        tries={node: tuple(facts) for node, facts in tries.items()},
        broken=frozenset(broken),
        lost_accelerator=lost,
        unproven=frozenset(unproven),
        device_kinds=_find_kinds(check, tries),
        links=links,
        internal_links={node: tuple(speeds) for node, speeds in within.items()},
        link_tries=linked,
    )


def _best(tries: Iterable[ComputeFact]) -> ComputeFact | None:
    return max((fact for fact in tries if not fact.problem), key=lambda fact: fact.tflops, default=None)


def _last_tries_on_cpu(tries: Sequence[ComputeFact]) -> int:
    """How many tries in a row, up to the last one that did not fail, were on the CPU."""
    devices = [fact.device for fact in tries if fact.device and not fact.problem]
    return len(list(itertools.takewhile(lambda device: device == CPU, reversed(devices))))


def _find_on_cpu(check: NodeCheck, tries: Mapping[int, Sequence[ComputeFact]]) -> dict[int, str]:
    """The nodes that computed on the CPU in their last try where more than half of the others have an accelerator, the
    most common of which is named. No figure would show it to all: two CPUs beside two accelerators look like another
    kind of machine, and links between the two kinds never work."""
    devices: dict[int, str] = {}
    for node, facts in tries.items():
        devices.update((node, fact.device) for fact in facts if fact.device and not fact.problem)
    accelerators = Counter(device for device in devices.values() if device != CPU)
    if not accelerators or 2 * accelerators.total() <= len(devices) - 1:
        return {}
    usual_device = accelerators.most_common(1)[0][0]
    # One that has passed and trains on the CPU does so with its user's knowledge.
    return {
        node: usual_device for node, device in devices.items() if device == CPU and not check.nodes[node].already_passed
    }


def _find_kinds(check: NodeCheck, tries: Mapping[int, Sequence[ComputeFact]]) -> dict[int, Kind]:
    """By the slowest device of each node's best try, whose speed is the node's: so nodes with several models are
    compared by the one that they wait for."""
    devices = {node: best.device for node, facts in tries.items() if (best := _best(facts)) is not None}
    common: dict[int, Counter[str]] = {}
    for node, device in devices.items():
        if device:
            common.setdefault(check.nodes[node].workers, Counter())[device] += 1
    usual_device_of = {
        workers: min(found, key=lambda device: (-found[device], device)) for workers, found in common.items()
    }
    return {
        node: (workers, devices.get(node) or usual_device_of.get(workers, ""))
        for node in tries
        for workers in (check.nodes[node].workers,)
    }


class SpeedRanking(msgspec.Struct, frozen=True):
    """How nodes compare by one kind of speed. `slow` are fewer than those that are quicker by the threshold, so that
    these are the usual; `doubtful` are all that may turn out to be slow when more is known. `median` is the speed that
    a node is compared with."""

    slow: frozenset[int]
    doubtful: frozenset[int]
    median: Mapping[int, float]


def lower_median(speeds: Sequence[float]) -> float:
    """The lower median of speeds, that of the node itself among them, so that those that are slower have to be fewer.
    Of two it is the higher one."""
    return sorted(speeds)[_usual_place(len(speeds))]


def _usual_place(count: int) -> int:
    return 1 if count == 2 else (count - 1) // 2


def lower_median_with(ordered: Sequence[float], removed: Collection[float], added: Collection[float]) -> float:
    """`lower_median` of the speeds `ordered` with a few of them `removed` and others `added`. Takes no
    longer for many speeds than for few: a few that go and come move the others by as many places at most."""
    place = _usual_place(len(ordered) - len(removed) + len(added))
    begin = max(0, place - len(added))
    near = list(ordered[begin : place + len(removed) + 1])
    before = begin
    for speed in removed:
        at = bisect_left(near, speed)
        if at < len(near) and near[at] == speed:
            del near[at]
        elif at == 0:
            before -= 1
    return sorted([*near, *added])[place - before]


def rank_speeds(speeds: Mapping[int, float], group_of: Callable[[int], Hashable], threshold: float) -> SpeedRanking:
    """Compare each node with all of its comparison group.

    As many slow nodes as quick ones are two kinds of machine, of which none is blamed. Of two nodes the other one is
    the usual.

    A slow end makes a link slow for both, and so a third of the nodes may for a while slow another third: doubtful is
    a node that is slower than the last third.
    """
    slow, doubtful, medians = set(), set(), {}
    for nodes in group_by(speeds, group_of):
        ordered = sorted(speeds[node] for node in nodes)
        median = lower_median(ordered)
        quick = ordered[min(2 * len(ordered) // 3, len(ordered) - 1)]
        for node in nodes:
            medians[node] = median
            if speeds[node] * threshold < median:
                slow.add(node)
            if speeds[node] * threshold < quick:
                doubtful.add(node)
    return SpeedRanking(frozenset(slow), frozenset(slow | doubtful), medians)


def group_by(nodes: Iterable[int], group_of: Callable[[int], Hashable]) -> list[list[int]]:
    """The nodes by their group, each group in the order in which they are given."""
    parts: dict[Hashable, list[int]] = {}
    for node in nodes:
        parts.setdefault(group_of(node), []).append(node)
    return list(parts.values())


def node_names(check: NodeCheck) -> list[str]:
    """A name for each checked node: its host, and its place where two have the same host."""
    hosts = Counter(node.host for node in check.nodes)
    return [
        node.host if hosts[node.host] == 1 else f"node {place} on {node.host}" for place, node in enumerate(check.nodes)
    ]
