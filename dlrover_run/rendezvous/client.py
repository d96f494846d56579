"""The protocol of a rendezvous client, and the tracker that decides which assignments of which coordinator count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from dlrover_run.coordination.records import OVER, Assignment, NodeReport, Waiting
from dlrover_run.policies.parameter_servers.recovery import OrderMemory

OnChange = Callable[[], None]
"""Called when something of a board has become another: its assignment or its problem."""


class RendezvousClient(Protocol):
    """Where the records of coordination live, as one node sees it.

    `assignment` is the latest one. `problem` is a sentence when this node can take no part in the job, or no further
    one: it was refused, or nobody coordinates any more. `is_user_error` says that the user's settings are why,
    so that the same command will fail again. `pids` are the processes that the board has started and that outlive this
    agent on purpose.
    """

    @property
    def assignment(self) -> Assignment: ...

    @property
    def problem(self) -> str | None: ...

    @property
    def is_user_error(self) -> bool: ...

    @property
    def pids(self) -> set[int]: ...

    def report(self, status: NodeReport) -> None:
        """Put this node's latest status on the board. It reaches the coordinator whenever one can be reached."""
        ...

    async def close(self) -> None:
        """Let the last status reach the coordinator, in a bounded time, and let go of the connection."""
        ...


class AssignmentTracker:
    """The latest assignment that counts, the coordinator that it came from, and what is to be repeated of it."""

    def __init__(self) -> None:
        self.assignment = Assignment()
        self.epoch = 0
        self.memory = OrderMemory()

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
        if self.assignment.ranks is not None or (order is not None and order.tasks):
            return False
        self.assignment = msgspec.structs.replace(self.assignment, waiting=waiting)
        return True
