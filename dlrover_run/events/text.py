"""One line of text for each event. Pure."""

from __future__ import annotations

from dlrover_run.coordination.reasons import render
from dlrover_run.events.records import (
    AgentEnded,
    CheckEnded,
    CheckpointRestored,
    CheckpointSeen,
    CheckStarted,
    CoordinatorChanged,
    Event,
    JobEnded,
    LogGap,
    LogOpened,
    NodeWaiting,
    RoundClosed,
    RoundFormed,
    StopRequested,
    WorkerExited,
    WorkerFailed,
    WorkerProgress,
    WorkerReady,
    WorkerResumed,
    WorkerStalled,
    WorkerStarted,
    name_of,
)


def short_name(event: Event) -> str:
    """The name of an event without the part that all have in common."""
    return name_of(type(event)).removeprefix("dlrover.")


def describe(event: Event) -> str:
    """What happened, without the name of the event."""
    match event:
        case LogOpened():
            return f"{event.program} of job {event.job}, pid {event.pid}"
        case LogGap():
            return f"{event.dropped} events could not be written"
        case NodeWaiting():
            return render(event.reasons)
        case CheckEnded():
            return _joined(event.status, event.reason)
        case RoundFormed():
            last = event.first_rank + event.workers - 1
            ranks = f"rank {last}" if event.workers == 1 else f"ranks {event.first_rank} to {last}"
            return _joined(f"round {event.round}, node {event.node} of {event.nodes}, {ranks}", render(event.reasons))
        case RoundClosed():
            return _joined(f"round {event.round}", render(event.reasons))
        case WorkerStarted():
            return f"{event.name}, pid {event.pid}"
        case WorkerReady():
            return f"{event.name} has reached its {event.stage}"
        case WorkerProgress():
            return f"{event.name}, step {event.steps}"
        case WorkerStalled():
            return _joined(f"{event.name} makes no progress", render(event.reasons))
        case WorkerResumed():
            return f"{event.name} makes progress again"
        case WorkerExited():
            how = f"by signal {-event.code}" if event.code < 0 else f"with exit code {event.code}"
            by = f", stopped with {event.stopped_with}" if event.stopped_with else ""
            return f"{event.name}, pid {event.pid}, {how}{by}"
        case WorkerFailed():
            return f"{event.name} {event.what}"
        case CheckpointSeen():
            return "" if event.step is None else f"step {event.step}"
        case CheckpointRestored():
            return f"step {event.step}"
        case CoordinatorChanged():
            return f"epoch {event.epoch} after {event.before}"
        case StopRequested():
            return "an operator drains the node" if event.drained else event.signal
        case JobEnded():
            return _joined(event.phase, render(event.reasons))
        case AgentEnded():
            return _joined(f"exit code {event.exit_code}", event.what or event.reason)
        case CheckStarted():
            return ""
    return ""


def _joined(head: str, reason: str) -> str:
    return f"{head}: {reason}" if reason else head
