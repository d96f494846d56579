"""How task processes end: what an end means for the cluster, and what the agent remembers of it."""

from __future__ import annotations

import re
import signal
import time
from dataclasses import dataclass

from dlrover_run.coordination.records.bounds import MAX_TRACE, MAX_WHAT
from dlrover_run.failures import causes
from dlrover_run.failures.guard import guarded
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.output.destinations import log_path
from dlrover_run.output.relay_client import RelayClient
from dlrover_run.processes.process import ManagedProcess, ProcessSpec
from tf_ps_runner.agent.report import EventPrinter
from tf_ps_runner.agent.task_process import TaskProcess
from tf_ps_runner.cluster.model import EndCause, Role, TaskEnd
from tf_ps_runner.cluster.rules import ROLES

MAX_ENDS = 50
"""Ends of tasks that are kept for the report on the job's end."""


class ExitClassifier:
    """Classifies the ends of a node's tasks. `ends` are the last of them, with the exits of their processes."""

    def __init__(self, relay: RelayClient, events: EventPrinter) -> None:
        self._relay = relay
        self._events = events
        self._raised: dict[tuple[Role, int], str] = {}
        self.ends: list[tuple[TaskEnd, WorkerExit]] = []

    async def classify(self, task: TaskProcess, process: ManagedProcess[ProcessSpec]) -> tuple[TaskEnd, WorkerExit]:
        """How a task has ended whose process has, once the end of its output is known, and the exit of that process."""
        assigned, start = task.assigned, task.start
        assert process.code is not None, "it has ended"
        assert start is not None, "a process has what it was started with"
        stopped = process.stopped_with if not task.hung else None
        code = process.code
        oom_kill = None
        if stopped is None and not task.hung:
            oom_kill = guarded("the memory limit", lambda: start.memory.explain_memory_kill(code), None)
        text = await start.stderr_tail(self._relay)
        start.forget_output(self._relay)
        end = WorkerExit(
            rank=assigned.rank,
            local_rank=assigned.rank,
            pid=process.pid,
            code=code,
            unix_time=process.ended_at,
            stopped_with=stopped,
            stderr_tail=text,
            stdout_path=log_path(start.outputs.stdout),
            stderr_path=log_path(start.outputs.stderr),
            oom_kill=oom_kill,
            name=str(assigned.key),
        )
        place = (assigned.role, assigned.rank)
        ended = classify_exit(
            ExitInfo(
                role=assigned.role,
                end=end,
                lived=time.monotonic() - task.started_at,
                hung=task.hung,
                asked_to_end=stopped is not None or task.leaving,
                stepped=task.past_beginning,
                before=self._raised.get(place),
            )
        )
        self._events.task_ended(task.key, ended, task.step)
        if (exception := exception_text(end)) is not None:
            self._raised[place] = exception
        else:
            self._raised.pop(place, None)
        self.ends = [*self.ends[-MAX_ENDS:], (ended, end)]
        return ended, end


EXIT_RESHAPED = 75
"""The exit code of a task that leaves because the cluster changes; the bootstrap and the hooks use the same."""

REPEATED_WITHIN = 10.0
"""Seconds from a task's start within which the same exception that ended its predecessor means that the next start
would fail the same way. A mistake in a script shows when it begins; a later failure may have another cause."""

REPEATED_BEFORE_STEP = 60.0
"""The same for a task that should make steps and has made none: importing TensorFlow and building a model take more
than ten seconds on a busy machine."""

_PASSING = re.compile(
    r"0x[0-9a-fA-F]+|\b(?:pid|tid|process|thread)\b\W{0,2}\d+|\b\d+\.\d+\.\d+\.\d+:\d+"
    r"|tempstate\d+|_temp_[0-9a-f]+|\btmp[a-z0-9_]{8}\b",
    re.IGNORECASE,
)
"""What differs between two texts of the same exception: addresses, process ids, temporary files. Any other number may
be the step that it was raised at, or that of a checkpoint."""

_TENSORFLOW_ERROR = re.compile(
    r"^(?:tensorflow\.|errors_impl\.|errors\.)"
    r"|^(?:Unavailable|Aborted|Cancelled|Internal|InvalidArgument|FailedPrecondition|Unknown|DeadlineExceeded|NotFound)"
    r"Error\b"
)
"""The beginning of an exception of TensorFlow. Any client in a script (of an object store, a database, a queue) reports
a broken connection with the same words, as Python's own ConnectionResetError or BrokenPipeError."""

_LOST_SERVER = re.compile(
    r"\bUnavailableError|\bAbortedError|Connection reset by peer|Socket closed|failed to connect to all addresses"
    r"|recvmsg:|Broken pipe|Graph handle is not found"
)
"""How TensorFlow reports that a server is gone, or is another one by now. That server is the failure."""


@dataclass(frozen=True)
class ExitInfo:
    """How a process ended, and what is known of the cause.

    `hung` is why it was killed as unresponsive, if it was. `asked_to_end` means that its agent requested it to
    leave, or stopped it. `stepped` means that it has made a step, as far as is known. `lived` is the time from its
    start to its end in seconds, and `before` is the exception of its predecessor of the same role and rank.
    """

    role: Role
    end: WorkerExit
    lived: float
    hung: str | None = None
    asked_to_end: bool = False
    stepped: bool = True
    before: str | None = None


def classify_exit(found: ExitInfo) -> TaskEnd:
    """What the node reports to the coordinator of the end. Pure."""
    end = found.end
    if found.hung is not None:
        return TaskEnd(EndCause.SILENT, found.hung[:MAX_WHAT], exit_status=end.exit_status)
    if end.oom_kill is not None:
        return TaskEnd(EndCause.MEMORY, causes.describe_exit(end)[:MAX_WHAT], exit_status=end.exit_status)
    if end.code == 0 and end.stopped_with is None:
        role = ROLES[found.role]
        if not role.ends_with_training and not found.asked_to_end:
            return _failure(end, f"ended by itself with code 0, which no {role.noun} does")
        return TaskEnd(EndCause.SUCCESS, "has succeeded")
    if end.code == EXIT_RESHAPED:
        return TaskEnd(EndCause.RESHAPED, "left for a change of the cluster")
    if end.code == 0:
        # A script that ends orderly at a signal has not finished its training.
        return TaskEnd(EndCause.RESHAPED, "ended with code 0 after a stop signal")
    if found.asked_to_end:
        return TaskEnd(EndCause.RESHAPED, causes.describe_exit(end)[:MAX_WHAT])
    text = exception_text(end)
    if text is not None and ROLES[found.role].uses_servers and is_lost_server(text):
        return TaskEnd(EndCause.RESHAPED, f"lost a parameter server: {causes.describe_exit(end)}"[:MAX_WHAT])
    soon = found.lived <= (REPEATED_WITHIN if found.stepped else REPEATED_BEFORE_STEP)
    if (
        soon
        and text is not None
        and found.before is not None
        and _PASSING.sub("", text) == _PASSING.sub("", found.before)
    ):
        return _failure(end, f"{causes.describe_exit(end)}, as the one before it did", EndCause.REPEATED)
    return _failure(end, causes.describe_exit(end))


def is_lost_server(exception: str) -> bool:
    """Whether an exception, as a task printed it in one line, is TensorFlow's report of a server that is gone."""
    return _TENSORFLOW_ERROR.search(exception) is not None and _LOST_SERVER.search(exception) is not None


def exception_text(end: WorkerExit) -> str | None:
    """The exception that ended a task, as the task printed it; None if it left none."""
    return None if end.code in (0, EXIT_RESHAPED) or end.code == -signal.SIGKILL else causes.summarize_error(end)


def _failure(end: WorkerExit, what: str, cause: EndCause = EndCause.FAILURE) -> TaskEnd:
    return TaskEnd(cause, what[:MAX_WHAT], "\n".join(causes.trace_lines(end))[-MAX_TRACE:], end.exit_status)
