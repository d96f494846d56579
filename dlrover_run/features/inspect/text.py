"""One line of text for each event. Pure."""

from __future__ import annotations

from dlrover_run.events import records
from dlrover_run.words.reasons import render
from dlrover_run.words.text import counted

_STAGES = {
    ("store", False): "has joined the others",
    ("step", False): "has made its first step",
    ("store", True): "is ready",
    ("step", True): "works",
}
"""What a worker has done at a stage, and what a task of `tf-ps-run`."""


def short_name(event: records.Event) -> str:
    """The name of an event without the part that all have in common."""
    return records.name_of(type(event)).removeprefix("dlrover.")


def describe(event: records.Event) -> str:
    """What happened, without the name of the event."""
    match event:
        case records.LogOpened():
            return f"{event.program} of job {event.job}, pid {event.pid}"
        case records.LogGap():
            return f"{counted(event.dropped, 'event')} could not be written"
        case records.NodeWaiting():
            return render(event.reasons)
        case records.CheckEnded():
            return _joined(event.status, event.reason)
        case records.RoundFormed():
            last = event.first_rank + event.workers - 1
            ranks = f"rank {last}" if event.workers == 1 else f"ranks {event.first_rank} to {last}"
            return _joined(f"round {event.round}, node {event.node} of {event.nodes}, {ranks}", render(event.reasons))
        case records.RoundClosed():
            return _joined(f"round {event.round}", render(event.reasons))
        case records.WorkerStarted():
            return f"{event.name}, pid {event.pid}"
        case records.WorkerKept():
            return f"{event.name} keeps its process, pid {event.pid}"
        case records.WorkerPrepared():
            return _joined(f"a warm worker waits for {event.name}, pid {event.pid}", event.device)
        case records.WorkerReady():
            return f"{event.name} {_STAGES.get((event.stage, bool(event.role)), f'has reached its {event.stage}')}"
        case records.WorkerProgress():
            return f"{event.name}, step {event.steps}"
        case records.WorkerResources():
            return _used(event)
        case records.WorkerStalled():
            return _joined(f"{event.name} makes no progress", render(event.reasons))
        case records.WorkerResumed():
            return f"{event.name} makes progress again"
        case records.StragglerFound():
            return _joined(f"{event.name} is a straggler", render(event.reasons))
        case records.StragglerGone():
            return f"{event.name} is a straggler no more"
        case records.WatchFailed():
            return event.what
        case records.WatchRestored():
            return f"hangs are found again, after {event.seconds:.0f} s"
        case records.WorkerExited():
            how = f"by signal {-event.code}" if event.code < 0 else f"with exit code {event.code}"
            by = f", stopped with {event.stopped_with}" if event.stopped_with else ""
            return f"{event.name}, pid {event.pid}, {how}{by}"
        case records.WorkerFailed():
            return f"{event.name} {event.what}"
        case records.CheckpointSeen():
            return "" if event.step is None else f"step {event.step}"
        case records.CheckpointRestored():
            return f"step {event.step}"
        case records.CoordinatorChanged():
            return f"epoch {event.epoch} after {event.before}"
        case records.StopRequested():
            return "an operator drains the node" if event.drained else event.signal
        case records.JobEnded():
            return _joined(event.phase, render(event.reasons))
        case records.AgentEnded():
            return _joined(f"exit code {event.exit_code}", event.what or event.reason)
    return ""


def _used(event: records.WorkerResources) -> str:
    memory = max(event.memory, event.peak) / 2**30
    parts = [] if event.processors is None else [f"CPU {event.processors:.2f}"]
    parts.append(f"memory {memory:.2f} of {event.limit / 2**30:.1f} GiB")
    parts += [
        f"GPU {device.index} {device.memory / 2**30:.2f} of {device.total / 2**30:.1f} GiB"
        for device in event.devices
        if device.memory is not None and device.total
    ]
    return f"{event.name}{' ended' if event.ended else ''}, {', '.join(parts)}"


def _joined(head: str, reason: str) -> str:
    return f"{head}: {reason}" if reason else head
