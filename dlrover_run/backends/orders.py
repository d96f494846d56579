"""Whose word a node follows, when coordinators come and go and words arrive late.

Pure: nothing is asked but what was heard.
"""

from __future__ import annotations

import msgspec

from dlrover_run.coordination.cluster.account import Memory
from dlrover_run.coordination.records import OVER, Assignment, Waiting


class Orders:
    """The latest assignment that counts, the coordinator that it came from, and what is to be repeated of it."""

    def __init__(self) -> None:
        self.assignment = Assignment()
        self.epoch = 0
        self.memory = Memory()

    def take(self, wanted: Assignment) -> bool:
        """Hear a word; whether there is something new to do."""
        if wanted.epoch < self.epoch:
            # From a coordinator that has a successor and has not noticed yet.
            return False
        self.epoch = wanted.epoch
        if wanted.cluster is not None and wanted.cluster.keep:
            wanted = msgspec.structs.replace(wanted, cluster=self.assignment.cluster)
        if wanted.key < self.assignment.key and wanted.phase not in OVER:
            # From a coordinator that began anew and is still to hear of the latest round, whose workers go on.
            return False
        if wanted == self.assignment:
            return False
        self.assignment = wanted
        self.memory = self.memory.follow(wanted.cluster)
        return True

    def wait(self, waiting: Waiting) -> bool:
        """Show what the node waits for while no coordinator says so; whether that is shown to anybody."""
        order = self.assignment.cluster
        if self.assignment.seat is not None or (order is not None and order.tasks):
            return False
        self.assignment = msgspec.structs.replace(self.assignment, waiting=waiting)
        return True
