"""The events of a job. Each is one JSON object, which holds its name as `event`.

Names and fields are stable: a program may read them. A reader ignores fields and events that it does not know, so a
new field or event keeps SCHEMA; a changed meaning increases it. An event holds codes and figures, and text only where a
worker or the user wrote it.

A file holds the events of one agent. What is the same for all of them is in the first line, `dlrover.log.opened`. Times
of one file are compared by `mono`, which no clock adjustment changes; `time` is for people and to sort several files.
"""

from __future__ import annotations

import functools
import operator
from datetime import UTC, datetime
from typing import Any

import msgspec

from dlrover_run.coordination.records.resource_use import DeviceFigures
from dlrover_run.words.reasons import Reasons

SCHEMA = 1
"""The version of the meaning of names and fields."""

FILE_NAME = "events.jsonl"
"""The name of the log in a run's directory. Names in a directory of several agents end with `.events.jsonl`."""

UNSET_TIME = datetime(1970, 1, 1, tzinfo=UTC)

INFO, WARNING, ERROR = "INFO", "WARNING", "ERROR"


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event"):
    """What all events have. The writer sets `time`, in UTC, `mono`, seconds of this host's monotonic clock, and the
    severity."""

    time: datetime = UNSET_TIME
    mono: float = 0.0
    severity: str = INFO


class LogOpened(Event, frozen=True, kw_only=True, tag="dlrover.log.opened"):
    """The first line of each file: the agent. `part` counts the files of this agent, from 0; `began` is when its
    launcher began, as `mono`. `workers` is the number of its workers in each round, 0 if it changes. `stages` are those
    that it observes of every script (WorkerReady). A worker of which none is observed counts as training. `launcher` is
    the pid of the command that started the job here, and `script` what its workers run, without a directory and without
    its arguments, which may be secret; both are empty in the logs of earlier versions."""

    schema: int
    job: str
    host: str
    node_id: str
    pid: int
    workers: int
    began: float
    program: str = "dlrover-run"
    launcher: int = 0
    script: str = ""
    part: int = 0
    stages: tuple[str, ...] = ()


class LogGap(Event, frozen=True, kw_only=True, tag="dlrover.log.gap"):
    """Events since the one before could not be written; `dropped` is their number."""

    dropped: int


class NodeWaiting(Event, frozen=True, kw_only=True, tag="dlrover.node.waiting"):
    """The node has no ranks, and waits for what the reasons name, at most `seconds` from now."""

    reasons: Reasons
    seconds: float | None = None


class CheckStarted(Event, frozen=True, kw_only=True, tag="dlrover.check.started"):
    """The node check of this node has begun."""


class CheckEnded(Event, frozen=True, kw_only=True, tag="dlrover.check.ended"):
    """The node check of this node has a result."""

    status: str
    reason: str = ""


class RoundFormed(Event, frozen=True, kw_only=True, tag="dlrover.round.formed"):
    """The node has ranks in a round: `first_rank` and those after it, one for each of its `workers`. The reasons are
    why there is this round. The failed rank is that of the round before, None if no worker failed."""

    round: int
    epoch: int
    node: int
    nodes: int
    first_rank: int
    workers: int
    world_size: int
    restarts: int
    reasons: Reasons = ()
    failed_rank: int | None = None
    failed_node: str = ""
    failed_what: str = ""


class RoundClosed(Event, frozen=True, kw_only=True, tag="dlrover.round.closed"):
    """The node has no ranks in that round any more. `failed` if a worker of any node failed in it."""

    round: int
    epoch: int
    reasons: Reasons = ()
    failed: bool = False


class WorkerEvent(Event, frozen=True, kw_only=True):
    """What the events of a worker have: its round, its rank there, and which of this agent's workers it is. The worker
    of a later round takes the place of the earlier one with its `local_rank`.

    In a job of `tf-ps-run` a worker is a task: `role` is that of the task, `rank` its rank in that role, `round` the
    version of the cluster, and each role and rank on this node has a `local_rank` of its own.
    """

    round: int
    rank: int
    local_rank: int
    role: str = ""

    @property
    def name(self) -> str:
        """The name for a person."""
        return f"{self.role} {self.rank}" if self.role else f"rank {self.rank}"


class WorkerStarted(WorkerEvent, frozen=True, kw_only=True, tag="dlrover.worker.started"):
    """The process of a worker runs, `since` a time as `mono`, to 5 ms. One that does not train the model, as an
    evaluator, loses no work with it."""

    pid: int
    since: float | None = None
    trains: bool = True


class WorkerReady(WorkerEvent, frozen=True, kw_only=True, tag="dlrover.worker.ready"):
    """A worker has reached a stage: `store` (it has joined the others; a task of `tf-ps-run` is ready) or `step` (its
    first step is done, that of this round if it runs since an earlier one). `since` is when, as `mono`, if that is
    before the event."""

    stage: str
    since: float | None = None


class WorkerKept(WorkerEvent, frozen=True, kw_only=True, tag="dlrover.worker.kept"):
    """A worker of an earlier round has joined the others of this one with its process, so no work is lost
    (`--survivors=keep`)."""

    pid: int


class WorkerPrepared(WorkerEvent, frozen=True, kw_only=True, tag="dlrover.worker.prepared"):
    """A process waits to become the worker of this local rank in the next round (`--warm-workers`); it has the pid of
    that worker then. `device` is the device that it has opened, or why it could not. It has begun at
    `since`, a time of the monotonic clock."""

    pid: int
    since: float
    device: str = ""


class WorkerProgress(WorkerEvent, frozen=True, kw_only=True, tag="dlrover.worker.progress"):
    """Figures of a worker since the start of its process: steps, samples, and seconds in which it waited for
    data."""

    steps: int = 0
    samples: int = 0
    waited: float = 0.0


class WorkerResources(WorkerEvent, frozen=True, kw_only=True, tag="dlrover.worker.resources"):
    """What a worker uses together with the processes below it, each minute and when a worker of this node fails: the
    number of processors that it keeps busy, and resident bytes, of the `limit` that this container or machine has for
    all. With `ended` it has failed, `memory` is that of the last sample before, and `peak` the most resident bytes that
    its own process ever had."""

    pid: int
    memory: int = 0
    limit: int = 0
    processors: float | None = None
    processes: int = 1
    devices: tuple[DeviceFigures, ...] = ()
    peak: int = 0
    ended: bool = False


class WorkerStalled(WorkerEvent, frozen=True, kw_only=True, tag="dlrover.worker.stalled"):
    """A worker makes no progress since `since`, as `mono`. The reasons name the evidence. `collectives` say where it is
    in each of its groups, by what NCCL or torch's flight recorder show: the numbers of the last operations that it has
    entered and that have ended, and the kind, number and bytes of the one in which it is."""

    since: float
    reasons: Reasons = ()
    guilty: bool = False
    collectives: tuple[dict[str, Any], ...] = ()


class WorkerResumed(WorkerEvent, frozen=True, kw_only=True, tag="dlrover.worker.resumed"):
    """A stalled worker makes progress again."""


class CollectivesRead(Event, frozen=True, kw_only=True, tag="dlrover.collectives.read"):
    """The workers of this node seem to hang, and the agent has asked a source, "ras" or "flight_recorder", where
    they are in their collectives. It took `seconds` and told of so many `workers`; `problem` says why it gave no
    answer."""

    round: int
    source: str
    workers: int = 0
    seconds: float = 0.0
    problem: str = ""


class StragglerFound(WorkerEvent, frozen=True, kw_only=True, tag="dlrover.straggler.found"):
    """The other workers of the round wait for a worker in each step. The reasons name what it does meanwhile."""

    reasons: Reasons = ()


class StragglerGone(WorkerEvent, frozen=True, kw_only=True, tag="dlrover.straggler.gone"):
    """They do not wait for it any more."""


class WatchFailed(Event, frozen=True, kw_only=True, tag="dlrover.watch.failed"):
    """The agent cannot look for hangs and stragglers: `what` is the error. It tries again."""

    what: str = ""


class WatchRestored(Event, frozen=True, kw_only=True, tag="dlrover.watch.restored"):
    """It looks for them again, after `seconds`."""

    seconds: float


class WorkerExited(WorkerEvent, frozen=True, kw_only=True, tag="dlrover.worker.exited"):
    """The process of a worker has ended. `code` follows `subprocess`: an exit code, or minus a signal's number.
    `stopped_with` is the signal by which the launcher stopped it, empty if it ended by itself. `since` is when its
    script was over, as `mono`: then its interpreter began to end. `peak_memory` is the most resident bytes that it had
    at a time, 0 if that is not known."""

    pid: int
    code: int
    stopped_with: str = ""
    since: float | None = None
    peak_memory: int = 0

    @property
    def failed(self) -> bool:
        """Whether it ended by itself, and badly."""
        return self.code != 0 and not self.stopped_with


class WorkerFailed(WorkerEvent, frozen=True, kw_only=True, tag="dlrover.worker.failed"):
    """The failure of a worker of this node that is the root cause of the end of its round, as far as this node can
    know. `cause` is a `failures.causes.Cause`; `what` follows the name of the worker in a sentence."""

    pid: int
    code: int
    cause: str
    what: str
    trace: str = ""


class DeviceErrorSeen(Event, frozen=True, kw_only=True, tag="dlrover.device.error"):
    """The driver has reported an error of a GPU: its index at NVML, the Xid `number`, and its `kind`, a
    `devices.xids.XidClass`."""

    device: int
    number: int
    kind: str


class DevicesFreed(Event, frozen=True, kw_only=True, tag="dlrover.device.freed"):
    """Since `since`, as `mono`, the next round has waited for the end of that number of `processes`, which the last one
    had left behind with a device. `left` of them could not be ended."""

    since: float
    processes: int
    left: int = 0


class CheckpointSeen(Event, frozen=True, kw_only=True, tag="dlrover.checkpoint.seen"):
    """A checkpoint is complete: work before it is not lost with the workers."""

    round: int = 0
    rank: int | None = None
    step: int | None = None


class CheckpointRestored(Event, frozen=True, kw_only=True, tag="dlrover.checkpoint.restored"):
    """Training goes on after the step of a checkpoint: work after it is lost."""

    step: int


class CoordinatorChanged(Event, frozen=True, kw_only=True, tag="dlrover.coordinator.changed"):
    """Another coordinator sends the assignments: a new master, or another elected agent."""

    epoch: int
    before: int


class StopRequested(Event, frozen=True, kw_only=True, tag="dlrover.stop.requested"):
    """A signal asks this node to leave, or an operator: then it is `drained`, and its workers are sent that signal."""

    signal: str
    drained: bool = False


class ScaleCommandEnded(Event, frozen=True, kw_only=True, tag="dlrover.scale.command"):
    """A run of `--scale-command` for that number of nodes has ended, after `seconds`. `code` follows `subprocess`, None
    if it could not be started. `what` says how it has failed, empty if it has not."""

    nodes: int
    code: int | None = None
    seconds: float = 0.0
    what: str = ""


class JobEnded(Event, frozen=True, kw_only=True, tag="dlrover.job.ended"):
    """The job is over on all nodes: `phase` is `finished` or `failed`."""

    phase: str
    restarts: int = 0
    reasons: Reasons = ()


class AgentEnded(Event, frozen=True, kw_only=True, tag="dlrover.agent.ended"):
    """The last line of a complete file. `reason` is an `ExitReason`."""

    exit_code: int
    reason: str
    what: str = ""


_KINDS = (*Event.__subclasses__(), *WorkerEvent.__subclasses__())
AnyEvent: Any = functools.reduce(operator.or_, (kind for kind in _KINDS if kind is not WorkerEvent))
"""Each event that a line of a log may be."""


def name_of(kind: type[Event]) -> str:
    """The name of an event in the log."""
    return str(kind.__struct_config__.tag)


def severity_of(event: Event) -> str:
    """How much an event matters to a person who looks for failures."""
    match event:
        case WorkerFailed() | JobEnded(phase="failed"):
            return ERROR
        case WorkerExited() if event.failed:
            return ERROR
        case ScaleCommandEnded() if event.what:
            return WARNING
        case LogGap() | WorkerStalled() | StragglerFound() | WatchFailed() | RoundClosed(failed=True):
            return WARNING
    return INFO


def stamped(event: Event, time: datetime, mono: float) -> Event:
    """The event as it is kept: with its times, and its severity."""
    return msgspec.structs.replace(event, time=time, mono=round(mono, 6), severity=severity_of(event))


class Events:
    """Takes the events of one agent. This one forgets them; `writer.EventWriter` keeps them in a file, and
    `recent.RecentEvents` the last ones in memory."""

    def emit(self, event: Event) -> None:
        """Take an event that happens now. It returns at once, and never fails."""

    def close(self) -> bool:
        """Wait, for a limited time, until all events are in the log. Returns whether they are; there are no more."""
        return True

    @property
    def path(self) -> str:
        """The file that has all events until now; empty without one."""
        return ""

    def lines(self) -> list[bytes]:
        """The events that are kept in memory, as lines of a log, the first line included."""
        return []


NO_EVENTS = Events()
