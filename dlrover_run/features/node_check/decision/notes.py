"""What a check has found beside the status of each node: links that are slow or broken, other kinds of device, and
what cannot be decided. Sentences for a user, of which none blames a node.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass
from typing import Any

from dlrover_run.features.node_check.decision.evidence import Evidence, Pair, SpeedRanking, group_by, node_names
from dlrover_run.features.node_check.decision.model import NodeCheck
from dlrover_run.words.text import counted, join_names

MAX_KINDS = 8
"""Kinds of device, beside the usual one, of which a sentence each is reported."""

MAX_LINK_NOTES = 8
"""Broken links, and slow ones, of which a sentence each is reported: an uplink has a link for each two nodes."""

MAX_QUOTED_PROBLEM = 200
"""Characters of a problem inside a reason: the nodes that agree about it have to fit too."""


class CheckText:
    """The names of the nodes of a check, and the causes of failed links."""

    def __init__(self, check: NodeCheck) -> None:
        self.names = node_names(check)
        self._problems = _first_problems(check)

    def join(self, nodes: Collection[int]) -> str:
        """At most three of the nodes by name."""
        return join_names([self.names[node] for node in sorted(nodes)])

    def because(self, *ends: int) -> str:
        """The problem of the first link that failed between these, or of the one of which this is an end."""
        problem = self._problems.get(frozenset(ends), "")
        return f" ({problem[:MAX_QUOTED_PROBLEM]})" if problem else ""


def _first_problems(check: NodeCheck) -> Mapping[frozenset[int], str]:
    """Of each node, and of each two that have tried a link, the problem of the first of their links that failed."""
    problems: dict[frozenset[int], str] = {}
    for fact in check.link_facts:
        if fact.problem:
            for ends in ({fact.one}, {fact.other}, fact.ends):
                problems.setdefault(frozenset(ends), fact.problem)
    return problems


@dataclass(frozen=True)
class Notes:
    """All the notes of a check. `unreachable` are nodes without a network, of which the `unconfirmed` are to try
    their links once more; `slow_links` are those with a slow network."""

    evidence: Evidence
    threshold: float
    words: CheckText
    computing: SpeedRanking
    linking: SpeedRanking
    slow_links: Set[int]
    unreachable: Set[int]
    unconfirmed: Set[int]

    def all(self) -> tuple[str, ...]:
        return (
            *self._on_kinds(),
            *self._on_spread(),
            *self._on_speed(
                self.computing, self.evidence.device_kinds.__getitem__, self.evidence.computes_at, "compute", "TFLOP/s"
            ),
            *self._on_speed(self.linking, self.evidence.comparison_group, self.evidence.best_in_group, "link", "GB/s"),
            *self._on_links(),
            *self._on_silence(),
        )

    def _on_kinds(self) -> list[str]:
        """Which nodes have another device than most nodes with as many workers have: a job waits for its slowest node,
        but none is at fault for its model."""
        notes = []
        for nodes in group_by(self.computing.median, self.evidence.comparison_group):
            by_device = {
                self.evidence.device_kinds[alike[0]][1]: alike
                for alike in group_by(nodes, self.evidence.device_kinds.get)
            }
            usual, *others = sorted(by_device, key=lambda device: (-len(by_device[device]), device))
            for device in others[:MAX_KINDS]:
                alike = by_device[device]
                if not self._compared(alike):
                    continue
                have = "has" if len(alike) == 1 else "have"
                compared = "its speed is compared with none" if len(alike) == 1 else "they are compared with each other"
                notes.append(
                    f"{self.words.join(alike)} {have} another kind of device ({device}) than the others ({usual}): "
                    f"{compared}"
                )
            if others[MAX_KINDS:]:
                notes.append(f"{counted(len(others) - MAX_KINDS, 'more kind')} of device are not named")
        return notes

    def _on_spread(self) -> list[str]:
        """Which nodes pass by their best try though most of their tries were slow: something disturbs them, or a card
        is slow now and then, and will be so when it trains."""
        notes = []
        for node in self._compared(self.computing.median):
            speeds = [fact.tflops for fact in self.evidence.tries[node] if not fact.problem]
            slow = [speed for speed in speeds if speed * self.threshold < self.computing.median[node]]
            if node not in self.computing.slow and 2 * len(slow) > len(speeds):
                notes.append(
                    f"{self.words.names[node]} computed slowly in {len(slow)} of {len(speeds)} tries, "
                    f"at {min(slow):.3g} TFLOP/s, and at {max(speeds):.3g} in its best one"
                )
        return notes

    def _on_speed(
        self,
        ranking: SpeedRanking,
        kind: Callable[[int], Any],
        speed: Callable[[int], float | None],
        do: str,
        unit: str,
    ) -> list[str]:
        """A note for a check in which most are slow, so that it is unusual to be quick."""
        notes = []
        for nodes in sorted(group_by(ranking.median, kind), key=lambda nodes: kind(nodes[0])):
            speeds = {node: speed(node) or 0.0 for node in nodes}
            top = max(speeds.values())
            behind = [node for node, value in speeds.items() if value * self.threshold < top]
            known = all(node in ranking.slow or node in self.slow_links for node in behind)
            if 2 * len(behind) < len(speeds) or known:
                continue
            quickest = max(speeds[node] for node in behind)
            notes.append(
                f"{len(behind)} of {len(speeds)} nodes {do} at no more than {quickest:.3g} {unit} where others reach "
                f"{top:.3g}: there may be two kinds of machine, so these are not compared"
            )
        return notes

    def _on_links(self) -> list[str]:
        broken, slow = [], []
        named = self.unreachable | self.slow_links
        for one, met in sorted(self.evidence.links.items()):
            for other, speed in sorted(met.items()):
                if one > other or one in named or other in named:
                    continue
                if speed is None and self.evidence.works(one) and self.evidence.works(other):
                    broken.append((one, other))
                elif speed is not None and self._link_is_slow(one, other, speed):
                    slow.append((one, other))
        notes = [
            f"{self._between(pair)} does not work{self.words.because(*pair)}, though both have others that do"
            for pair in broken[:MAX_LINK_NOTES]
        ]
        for one, other in slow[:MAX_LINK_NOTES]:
            elsewhere = min(self.evidence.best_in_group(end) or 0.0 for end in (one, other))
            speed = self.evidence.links[one][other] or 0.0
            notes.append(
                f"{self._between((one, other))} is slow: {speed:.3g} GB/s, where each of them reaches {elsewhere:.3g}"
            )
        if more := len(broken[MAX_LINK_NOTES:]) + len(slow[MAX_LINK_NOTES:]):
            are = "is" if more == 1 else "are"
            notes.append(
                f"{counted(more, 'more link')} between nodes that do well with others {are} slow or broken: something "
                "between these nodes may be, such as the uplink of a rack"
            )
        return notes

    def _between(self, pair: Pair) -> str:
        return f"the link between {self.words.names[pair[0]]} and {self.words.names[pair[1]]}"

    def _link_is_slow(self, one: int, other: int, speed: float) -> bool:
        bests = [self.evidence.best_in_group(end) or 0.0 for end in (one, other)]
        return self.evidence.are_comparable(one, other) and speed * self.threshold < min(bests)

    def _on_silence(self) -> list[str]:
        """What cannot be decided because too few others had links that work."""
        failing = [node for node, met in self.evidence.links.items() if met and not self.evidence.works(node)]
        certain = self.unreachable - self.unconfirmed
        unknown = [
            node for node in failing if node not in certain and not self.evidence.check.nodes[node].already_passed
        ]
        if not unknown:
            return []
        if not any(self.evidence.works(node) for node in self.evidence.links):
            return [
                f"no link between {self.words.join(failing)} works{self.words.because(failing[0])}, "
                "and no other node was there to link with: which of them is at fault cannot be decided"
            ]
        return [
            f"no link of {self.words.names[node]} works{self.words.because(node)}, "
            "but too few others have links that do to decide which is at fault"
            for node in unknown
        ]

    def _compared(self, nodes: Collection[int]) -> list[int]:
        return [node for node in sorted(nodes) if not self.evidence.check.nodes[node].already_passed]
