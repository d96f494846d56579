"""How healthy the nodes of a made-up job really are, and what they find when a check asks them to try something."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover_run.policies.health.model import (
    CheckKey,
    CheckTask,
    ComputeResult,
    DeviceSpeed,
    LinkEnd,
    LinkResult,
    LinkResults,
)

USUAL = 10.0
"""TFLOP/s, and GB/s, of a node of which nothing else is said."""


@dataclass
class Truth:
    """Nodes are known by their addresses. Those of `crashing` die while they compute, those of `wrong` compute wrongly,
    those of `cut` reach nobody, and links of `bad` do not work. `slowness` divides a node's speed at computing, and
    `link_slowness` that of all its links."""

    crashing: set[str] = field(default_factory=set)
    wrong: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    bad: set[frozenset[str]] = field(default_factory=set)
    slowness: dict[str, float] = field(default_factory=dict)
    link_slowness: dict[str, float] = field(default_factory=dict)

    def compute(self, address: str, key: CheckKey = CheckKey()) -> ComputeResult:  # noqa: B008 (it is frozen)
        """What comes of computing on that node."""
        if address in self.crashing:
            return ComputeResult(key, problem="its check process was killed by SIGKILL")
        if address in self.wrong:
            return ComputeResult(key, problem="a product was off by 3", wrong=True)
        return ComputeResult(key, (DeviceSpeed(0, "cpu", USUAL / self.slowness.get(address, 1.0)),))

    def link(self, address: str, task: CheckTask) -> LinkResults:
        """What the node finds of the links of its task."""
        return LinkResults(task.key, tuple(self._try(task.node, ends) for ends in task.links))

    def _try(self, node: int, ends: tuple[LinkEnd, ...]) -> LinkResult:
        other = next((end.node for end in ends if end.node != node), node)
        addresses = frozenset(end.address for end in ends)
        works = addresses not in self.bad and (len(ends) == 1 or not addresses & self.cut)
        if not works:
            return LinkResult(other, problem="connection refused")
        return LinkResult(other, USUAL / max(self.link_slowness.get(address, 1.0) for address in addresses))

    def is_healthy(self, address: str) -> bool:
        """Whether nothing is wrong with that node."""
        ailing = self.crashing | self.wrong | self.cut | self.slowness.keys() | self.link_slowness.keys()
        return address not in ailing
