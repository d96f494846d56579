"""What a user reads of a job on this node: one line for each event, and the result at the end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dlrover_run import exit_codes
from dlrover_run.agent.os_errors import explain_os_error
from dlrover_run.coordination.model import OVER, Assignment, Failure, PlanPhase
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.policies.parameter_servers.model import EndCause, NodeOrder, Role, TaskEnd, TaskKey
from dlrover_run.policies.parameter_servers.recovery import SHORT_END
from dlrover_run.policies.parameter_servers.text import EVALUATION_FAILED, new_part
from dlrover_run.spec import SpecError
from tf_ps_runner.agent.protocol import Note, Restored, Saved, printable


@dataclass(frozen=True)
class JobResult:
    """The end of a job on this node. `root` is the task of this node that ended the job, `failure` what is known of one
    on another node; `error` is a sentence if no task ended the job, or this node's part in it. `why_over` is a clause
    that says why there was no further start. `warning` is a sentence about a job that has succeeded all the same."""

    exit_code: int
    reason: str
    root: WorkerExit | None = None
    failure: Failure | None = None
    error: str | None = None
    why_over: str = ""
    warning: str | None = None


@dataclass(frozen=True)
class JobEnd:
    """All that the result depends on.

    `wanted` is the last assignment. `ends` are the last ends of this node's tasks, as reported and as observed, in that
    order, and `host` is the name of this node. `stopped_by` is a signal that asked this node to leave, `problem` why it
    could take no part in the job; `mistaken` means that the user's settings are the reason. `gave_up` is what kept it
    from starting or stopping tasks.
    """

    wanted: Assignment
    ends: tuple[tuple[TaskEnd, WorkerExit], ...]
    host: str
    stopped_by: signal.Signals | None
    problem: str | None
    gave_up: Exception | None
    mistaken: bool = False


def resolve_result(ending: JobEnd, compat: bool) -> JobResult:
    """The result of a job that is over for this node; with `compat` there is one code for all failures."""
    wanted = ending.wanted
    failed = wanted.phase is PlanPhase.FAILED
    root = _own_root(ending.ends, wanted.failure, ending.host) if failed else None
    stopped = wanted.phase not in OVER and ending.stopped_by is not None
    reason = wanted.reason
    if stopped and ending.stopped_by is not None:
        reason = f"{ending.stopped_by.name} stopped the job"
    return JobResult(
        exit_code=_exit_code(ending, root, compat),
        reason=reason,
        root=root,
        failure=wanted.failure if failed and root is None else None,
        error=_error(ending),
        why_over=_why_over(wanted, root) if failed else "",
        warning=_warning(wanted),
    )


def _own_root(ends: Sequence[tuple[TaskEnd, WorkerExit]], failure: Failure | None, host: str) -> WorkerExit | None:
    """The end of the task that the coordinator names, if it was one of this node's."""
    if failure is None or failure.host != host:
        return None
    for told, end in reversed(ends):
        # A coordinator that recovered from short reports knows only those.
        if end.rank == failure.rank and failure.what in (told.what, told.what[:SHORT_END]):
            return end
    return None


def _why_over(wanted: Assignment, root: WorkerExit | None) -> str:
    """The coordinator's sentence without its first part, which the report puts in its own words."""
    _, separator, rest = wanted.reason.rpartition("; ")
    return rest if separator else "" if root is not None else wanted.reason


def _warning(wanted: Assignment) -> str | None:
    if wanted.phase is PlanPhase.FINISHED and EVALUATION_FAILED in wanted.reason:
        return f"warning: {EVALUATION_FAILED}"
    return None


def _exit_code(ending: JobEnd, root: WorkerExit | None, compat: bool) -> int:
    if ending.gave_up is not None:
        mistake = isinstance(ending.gave_up, SpecError)
        return exit_codes.BAD_COMMAND_LINE if mistake else exit_codes.of_failure(exit_codes.CANNOT_START, compat)
    phase = ending.wanted.phase
    if phase is PlanPhase.FINISHED:
        return exit_codes.SUCCESS
    if ending.stopped_by is not None:
        return exit_codes.of_failure(exit_codes.of_signal(ending.stopped_by), compat)
    if phase is PlanPhase.FAILED:
        if root is not None:
            code = root.exit_status or exit_codes.PEER_FAILED
        else:
            code = exit_codes.TOO_FEW_NODES if ending.wanted.failure is None else exit_codes.PEER_FAILED
    elif ending.problem is not None:
        if ending.mistaken:
            return exit_codes.BAD_COMMAND_LINE
        code = exit_codes.CANNOT_JOIN
    else:
        code = exit_codes.INTERNAL_ERROR
    return exit_codes.of_failure(code, compat)


def _error(ending: JobEnd) -> str | None:
    gave_up, wanted = ending.gave_up, ending.wanted
    if gave_up is not None:
        return (
            f"the tasks could not be started: {explain_os_error(gave_up)}"
            if isinstance(gave_up, OSError)
            else str(gave_up)
        )
    if wanted.phase is PlanPhase.FAILED and wanted.failure is None:
        return f"the job failed: {wanted.reason}"
    return None if wanted.phase in OVER else ending.problem


class EventPrinter:
    """Prints a line for each event of this node's tasks and of the cluster, with `say`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._reason = ""
        self._told_watch = False
        self._order: NodeOrder | None = None

    def follow(self, wanted: Assignment) -> None:
        """The coordinator's assignment, and its reason."""
        if wanted.cluster is None:
            return
        self._order = wanted.cluster
        before, self._reason = self._reason, wanted.reason
        if self._reason != before:
            self._say(new_part(before, self._reason))

    def memory_limited(self, kept_by: str) -> None:
        """A task has a memory limit that is enforced in this way."""
        if kept_by == "watch" and not self._told_watch:
            self._told_watch = True
            self._say(
                "warning: no control group can be made here, so processes are looked at for their memory, and a fast "
                "one takes more than its limit before it is killed"
            )

    def task_ended(self, key: TaskKey, end: TaskEnd, step: int) -> None:
        """A process has ended; `step` is its last known step, -1 if it reported none."""
        if key.role is Role.CHIEF and end.cause is EndCause.SUCCESS and step < 0:
            self._say(
                f"warning: {key} has succeeded without a session in the cluster: does the script read TF_CONFIG? One "
                "that does not trains alone in each of its processes"
            )

    def task_message(self, key: TaskKey, event: Note | Restored | Saved) -> None:
        """A process has sent a message for the user."""
        if isinstance(event, Note):
            self._say(f"{key}: {printable(event.text)}")
        elif isinstance(event, Saved):
            if self._order is not None and self._order.save:
                self._say(f"{key} has saved step {event.step}: {printable(event.path)}")
        else:
            for sentence in event.skipped:
                self._say(f"{key}: {printable(sentence)}")
            self._say(f"{key}: {_model(event)}")


def _model(event: Restored) -> str:
    # The coordinator reports how many steps were lost, because it knows the reports of all nodes.
    known = event.step >= 0
    if event.how == "checkpoint":
        return f"has restored {printable(event.path or '?')}, and goes on{f' after step {event.step}' if known else ''}"
    if event.how == "live":
        # Without a step of its own, the script decides: Keras' BackupAndRestore goes back to the beginning of an epoch.
        rest = f" at step {event.step}; no step lost" if known else "; the script decides from where"
        return f"goes on with the live model{rest}"
    if event.step > 0:
        return f"begins at step {event.step}, with a model that the script has restored by itself"
    return f"begins with a fresh model{' at step 0' if known else ''}"
