"""The open questions for the stacks of one job. Imported by a master that is asked."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from dlrover_run.coordination.records.requests import RequestFailed
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.job_status.stacks import NodeName, NodeStacks, StackRequest
from dlrover_run.transport.messages import StacksFound

MAX_STACK_REQUESTS = 4
"""Questions for the stacks of one job at a time; further ones are refused."""


class StackRequests:
    """The questions, by their numbers; a node answers with the number."""

    def __init__(self) -> None:
        self._open: dict[int, StackRequest] = {}
        self._number = 0

    def add(
        self, nodes: dict[NodeKey, NodeName], connected: Collection[NodeKey], on_done: Callable[[], None]
    ) -> StackRequest:
        """A question to these nodes; `on_done` is called when all that are connected have answered. An `end` follows.
        Raises RequestFailed."""
        if len(self._open) >= MAX_STACK_REQUESTS:
            raise RequestFailed("other programs ask for the stacks of this job just now; try again in a moment")
        self._number += 1
        request = self._open[self._number] = StackRequest(self._number, nodes, connected, on_done)
        return request

    def take(self, key: NodeKey, found: StacksFound) -> None:
        """A node's answer, which may come too late. Raises MsgspecError or UnicodeError for one that has no stacks."""
        if (request := self._open.get(found.number)) is not None:
            request.take(key, msgspec.json.decode(found.stacks, type=NodeStacks))

    def lose(self, key: NodeKey) -> None:
        """A node is not connected any more."""
        for request in tuple(self._open.values()):
            request.lose(key)

    def end(self, request: StackRequest) -> None:
        """Ignore later answers."""
        self._open.pop(request.number, None)
