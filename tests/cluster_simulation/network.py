"""What lies between the nodes and the coordinator: links that are in order while they hold, and that break."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlrover_run.coordination.model import Assignment

if TYPE_CHECKING:
    from cluster_simulation.nodes import Node
    from cluster_simulation.world import World

UNNOTICED = 0.3
"""Seconds at most until the coordinator sees that a connection has ended."""


@dataclass
class Link:
    """One connection of one node to one coordinator: when the last message of each way arrives."""

    master: int
    up: float = 0.0
    down: float = 0.0
    reporting: bool = False


class Network:
    """All links."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.links: dict[Node, Link] = {}

    def connect(self, node: Node) -> None:
        """The node says hello, if there is somebody to hear it."""
        world = self.world
        if not node.alive or node in self.links:
            return
        if node.cut or world.coordinator is None:
            world.timeline.after(world.timeline.random.uniform(0.1, 2.5), lambda: self.connect(node))
            return
        self.links[node] = Link(world.master)
        self.report(node)

    def report(self, node: Node) -> None:
        """The node's latest status is on its way."""
        link = self.links.get(node)
        if link is None or link.reporting:
            return
        link.reporting = True

        def send() -> None:
            if self.links.get(node) is not link:
                return
            link.reporting = False
            status = node.status()
            link.up = max(link.up, self.world.timeline.now + self._delay())

            def arrive() -> None:
                if self.links.get(node) is link and link.master == self.world.master:
                    self.world.hear(status)

            self.world.timeline.at(link.up, arrive)

        self.world.timeline.after(0.001, send)

    def tell(self, node: Node, told: Assignment) -> None:
        """An assignment is on its way."""
        link = self.links.get(node)
        if link is None:
            return
        link.down = max(link.down, self.world.timeline.now + self._delay())
        self.world.timeline.at(link.down, lambda: node.hear(told) if self.links.get(node) is link else None)

    def broke(self, node: Node) -> None:
        """The connection of that node is gone; it looks for another one."""
        link = self.links.pop(node, None)
        if link is None:
            return
        random = self.world.timeline.random

        def notice() -> None:
            if node not in self.links and link.master == self.world.master:
                self.world.lose(node)

        self.world.timeline.after(random.uniform(0, UNNOTICED), notice)
        self.world.timeline.after(random.uniform(0.05, 0.6), lambda: self.connect(node))

    def _delay(self) -> float:
        random = self.world.timeline.random
        return random.uniform(0.2, 1.5) if random.random() < 0.02 else random.uniform(0.001, 0.03)
