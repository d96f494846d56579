"""What an agent sees of a backend: a place for its status, and the latest that the coordinator wants of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dlrover_run.coordination.records import Assignment, NodeStatus

Listener = Callable[[], None]
"""Called when something of a board has become another: its assignment or its problem."""


class Board(Protocol):
    """Where the records of coordination live, as one node sees it.

    `assignment` is the latest one. `problem` is a sentence when this node can take no part in the job, or no further
    one: it was refused, or nobody coordinates any more. `mistaken` says that this is because of what the person gave,
    so that the same command will fail again. `pids` are the processes that the board has started and that outlive this
    agent on purpose.
    """

    @property
    def assignment(self) -> Assignment: ...

    @property
    def problem(self) -> str | None: ...

    @property
    def mistaken(self) -> bool: ...

    @property
    def pids(self) -> set[int]: ...

    def publish(self, status: NodeStatus) -> None:
        """Put this node's latest status on the board. It reaches the coordinator whenever one can be reached."""
        ...

    async def close(self) -> None:
        """Let the last status reach the coordinator, in a bounded time, and let go of the connection."""
        ...
