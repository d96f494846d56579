"""The protocol of a rendezvous client, and the tracker that decides which assignments count."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from dlrover_run.coordination.records.assignment import Assignment, Memories, Waiting, in_force
from dlrover_run.coordination.records.plan import OVER
from dlrover_run.coordination.records.report import NodeReport

if TYPE_CHECKING:
    from dlrover_run.coordination.records.requests import OperatorRequest
    from dlrover_run.job_status.questions import StackQuery
    from dlrover_run.job_status.stacks import JobStacks, NodeStacks
    from dlrover_run.job_status.status import JobStatus
    from dlrover_run.transport.messages import ReadStacks

StackSource = Callable[..., Awaitable["NodeStacks"]]
"""Returns the stacks of the workers of this node, or of that with the rank, within the time that
`job_status.stacks` gives a node; with a `LogRequest` as the second argument their output."""


def ask_source(source: StackSource, query: StackQuery | ReadStacks) -> Awaitable[NodeStacks]:
    """What a node answers to a question. The client of a backend calls it for a query that has come from outside."""
    return source(query.rank) if query.logs is None else source(query.rank, query.logs)


OnChange = Callable[[], None]
"""Called when the assignment or the problem of a client has changed."""


class AskFailed(Exception):
    """A question about a job without an answer; the message is a clause. `no_job`: there is no such job there."""

    def __init__(self, reason: str, no_job: bool = False) -> None:
        super().__init__(reason)
        self.no_job = no_job


class RendezvousClient(Protocol):
    """One node's connection to the coordinator, in whatever process that runs.

    `assignment` is the latest one in force. `problem` is a sentence if this node cannot take part in the job, or no
    longer: it was refused, or no coordinator can be reached. `is_user_error`: the user's settings are the cause, so
    the same command will fail again. `is_away`: the coordinator cannot be reached now, and could be before; `ask` and
    `ask_stacks` then answer for this node alone, and raise AskFailed for a request. `is_cut_off`: no other node can be
    reached either. `pids` are the processes that the client has started and that outlive this agent on purpose.
    `stack_source` answers a coordinator that asks this node for stacks; None for a node that has none.
    """

    stack_source: StackSource | None

    @property
    def assignment(self) -> Assignment: ...

    @property
    def problem(self) -> str | None: ...

    @property
    def is_user_error(self) -> bool: ...

    @property
    def is_away(self) -> bool: ...

    @property
    def is_cut_off(self) -> bool: ...

    @property
    def pids(self) -> set[int]: ...

    def report(self, report: NodeReport) -> None:
        """Send the latest report of this node, as soon as a coordinator can be reached."""

    async def ask(self, request: OperatorRequest | None = None) -> JobStatus:
        """The status of the job, after a request of an operator was taken, if there is one. The caller limits the time.
        Raises AskFailed."""

    async def ask_stacks(self, query: StackQuery) -> JobStacks:
        """The stacks of the job's workers. The caller limits the time. Raises AskFailed."""

    async def close(self) -> None:
        """Wait a bounded time until the coordinator has the last report, and disconnect."""


class AssignmentTracker:
    """Decides which assignment is in force when coordinators replace each other and messages arrive late. Pure.

    `assignment` names the coordinator that this node follows, by its epoch, and `memory` is what the node must report
    to a coordinator that has lost its records.
    """

    def __init__(self) -> None:
        self.assignment = Assignment()
        self.memory = Memories()

    def take(self, assignment: Assignment) -> bool:
        """Take a received assignment; return whether it changes what this node has to do."""
        if assignment.epoch < self.assignment.epoch:
            # From a coordinator that has been replaced and has not noticed yet.
            return False
        if assignment.key < self.assignment.key and assignment.phase not in OVER:
            # From a coordinator that restarted and does not know the latest round yet, whose workers keep running.
            # Until it does, this node follows the one before, as its reports say.
            return False
        parts = in_force(assignment.parts, self.assignment.parts)
        if parts != assignment.parts:
            assignment = msgspec.structs.replace(assignment, parts=parts)
        if assignment == self.assignment:
            return False
        self.assignment = assignment
        self.memory = self.memory.follow(assignment.parts)
        return True

    def show_waiting(self, waiting: Waiting) -> bool:
        """Show what the node waits for without a coordinator; return whether that changes anything."""
        if not self.assignment.waits:
            return False
        self.assignment = msgspec.structs.replace(self.assignment, waiting=waiting)
        return True
