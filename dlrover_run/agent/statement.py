"""What this node tells the coordinator of its workers."""

from __future__ import annotations

from dlrover_run import failures
from dlrover_run.agent.round import Round
from dlrover_run.agent.standing import Standing
from dlrover_run.coordination.bounds import MAX_TRACE, MAX_WHAT
from dlrover_run.coordination.records import Failure, NodePhase, NodeStatus
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.supervisor.process import StuckProcess


def statement(standing: Standing, current: Round | None, leaving: bool) -> NodeStatus:
    """What is to be said of the round whose seat this node has; `current` is the one whose workers it has started.

    A failure is told only when it is known how it came about, a moment after the worker's end.
    """
    if current is None or current.key != standing.round:
        # The workers of an earlier round may still be ending; nobody asks for them any more.
        return standing.status(NodePhase.LEAVING if leaving else NodePhase.WAITING)
    if current.group.succeeded:
        # Also when it has to go: what its workers have done is done, and the others need no round without them.
        return standing.status(NodePhase.SUCCEEDED, met=True)
    if leaving:
        return standing.status(NodePhase.LEAVING)
    end = current.failure
    if end is None:
        return standing.status(NodePhase.RUNNING)
    return standing.status(NodePhase.FAILED, failure_of(end, standing.host), current.got_to_work)


def failure_of(end: WorkerExit, host: str) -> Failure:
    """The failure of a worker of the node `host`, in the bounds of what travels."""
    return Failure(
        rank=end.rank,
        host=host,
        what=failures.describe_exit(end)[:MAX_WHAT],
        lost_peer=failures.lost_peer(end),
        trace=_clipped(failures.trace_lines(end)),
    )


def last_words(standing: Standing, gave_up: Exception | None) -> NodeStatus:
    """That this node takes no part any more; `gave_up` is why, where nobody asked it to go."""
    seat = standing.seat
    if gave_up is None or seat is None:
        return standing.status(NodePhase.LEFT)
    what = f"could not be {'stopped' if isinstance(gave_up, StuckProcess) else 'started'}: {gave_up}"
    failure = Failure(seat.first_rank, standing.host, what[:MAX_WHAT])
    return standing.status(NodePhase.LEFT, failure)


def _clipped(trace: list[str]) -> str:
    """At most MAX_TRACE characters: the heading, and of the rest the end, where the cause is."""
    text = "\n".join(trace)
    if len(text) <= MAX_TRACE:
        return text
    heading = trace[0][:100] + "\n"
    return heading + text[len(heading) - MAX_TRACE :]
