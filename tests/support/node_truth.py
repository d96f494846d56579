"""The true health of the nodes of a simulated job, and their results for the tasks of a node check."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover_run.features.node_check.decision.model import (
    CheckKey,
    CheckTask,
    ComputeResult,
    DeviceSpeed,
    LinkEnd,
    LinkResult,
    LinkResults,
)

USUAL = 10.0
"""TFLOP/s, and GB/s, of a node by default."""


@dataclass
class Truth:
    """Nodes are named by their addresses. Nodes of `crashing` die while they compute, nodes of `wrong` compute wrongly,
    nodes of `cut` reach no other node, and links of `bad` do not work. `slowness` divides the computing speed of a
    node, and `link_slowness` the speed of all its links."""

    crashing: set[str] = field(default_factory=set)
    wrong: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    bad: set[frozenset[str]] = field(default_factory=set)
    slowness: dict[str, float] = field(default_factory=dict)
    link_slowness: dict[str, float] = field(default_factory=dict)

    def compute(self, address: str, key: CheckKey = CheckKey()) -> ComputeResult:  # noqa: B008 (it is frozen)
        """Return the result of a computation on that node."""
        if address in self.crashing:
            return ComputeResult(key, problem="its check process was killed by SIGKILL")
        if address in self.wrong:
            return ComputeResult(key, problem="a product was off by 3", wrong=True)
        return ComputeResult(key, (DeviceSpeed(0, "cpu", USUAL / self.slowness.get(address, 1.0)),))

    def link(self, address: str, task: CheckTask) -> LinkResults:
        """Return the results of the node for the links of its task."""
        return LinkResults(task.key, tuple(self._try(task.node, ends) for ends in task.links))

    def _try(self, node: int, ends: tuple[LinkEnd, ...]) -> LinkResult:
        other = next((end.node for end in ends if end.node != node), node)
        addresses = frozenset(end.address for end in ends)
        works = addresses not in self.bad and (len(ends) == 1 or not addresses & self.cut)
        if not works:
            return LinkResult(other, problem="connection refused")
        return LinkResult(other, USUAL / max(self.link_slowness.get(address, 1.0) for address in addresses))

    def is_healthy(self, address: str) -> bool:
        """Whether that node is healthy."""
        ailing = self.crashing | self.wrong | self.cut | self.slowness.keys() | self.link_slowness.keys()
        return address not in ailing
