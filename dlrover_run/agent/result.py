"""The result of a job on this node: the exit code, how the workers ended, and what they returned."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import msgspec

from dlrover_run import exit_codes
from dlrover_run.agent.host import explain_os_error
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.plan import OVER, PlanPhase
from dlrover_run.coordination.records.round import Failure, RankAssignment
from dlrover_run.exit_reasons import ExitReason, ExitScheme, in_scheme
from dlrover_run.failures import causes
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.spec import SpecError
from dlrover_run.words.reasons import Code, render

if TYPE_CHECKING:
    from dlrover_run.coordination.records.assignment import Dismissal


class NodeRefused(Exception):
    """A feature keeps this node out of the job; a sentence for the user. It costs no restart. `exit_reason` is why the
    launcher ends."""

    def __init__(self, text: str, exit_reason: ExitReason = ExitReason.CANNOT_START) -> None:
        super().__init__(text)
        self.exit_reason = exit_reason


def describe_unused(noun: str, why: str) -> str:
    """What a node says that only waited in a job that has succeeded, without having been asked for as a spare: it has
    run no `noun`, and `why` is a clause. Its exit code is 0 all the same: a scheduler that starts one node too many,
    or a replacement too late, must not take the job for failed."""
    return f"warning: this launcher has run no {noun}: {why}; it has succeeded without this node"


class JobResult(msgspec.Struct, frozen=True):
    """The result of a job on this node. `exit_reason` is why the launcher ends. `results` are the pickled return
    values of a function launch, by global rank.

    `root` is the task of this node that failed first, `failure` any other failure that ended the job. `error` is a
    sentence if the job, or this node's part in it, was not ended by a task. `stopped` is true if a signal made this
    node leave. The other fields are as in `TaskResults`.
    """

    exit_code: int
    exit_reason: ExitReason
    reason: str
    restarts: int = 0
    ends: tuple[WorkerExit, ...] = ()
    root: WorkerExit | None = None
    failure: Failure | None = None
    error: str | None = None
    why_over: str = ""
    stopped: bool = False
    results: dict[int, bytes] = msgspec.field(default_factory=dict)
    failed_here: bool = False
    warning: str | None = None
    speaks_for_job: bool = True


class TaskResults(msgspec.Struct, frozen=True):
    """What this node's tasks have come to. `returned` are the pickled return values of a function launch, by global
    rank.

    `root` is the task of this node that failed first, `owns_failure` whether the failure that ended the job is its.
    `succeeded` is true if all tasks succeeded, `restarted` if these were not the first. `why_over` is a clause on
    why nothing was started after the failure. `failed_here` is true if the failed task ran on this
    node, though `root` is not known. `warning` is a sentence about a job that has succeeded all the same.
    `speaks_for_job` is true on the one node that prints what is said once for the whole job.
    """

    ends: tuple[WorkerExit, ...] = ()
    root: WorkerExit | None = None
    owns_failure: bool = False
    succeeded: bool = False
    restarted: bool = False
    returned: dict[int, bytes] = msgspec.field(default_factory=dict)
    why_over: str = ""
    failed_here: bool = False
    warning: str | None = None
    speaks_for_job: bool = True


class JobEnd(msgspec.Struct, frozen=True):
    """Everything that the result depends on.

    `assignment` is the last one of the coordinator, `noun` names the tasks. `stopped_by` is a signal that made this
    node leave; if the node was `drained`, an operator requested it and no signal was sent, and if it is `orphaned`, its
    launcher was killed, which is SIGKILL for the node too. `problem` is why it could
    not take part in the job, `is_user_error` that the user's settings are the cause, and `is_cut_off` that no other
    node could be reached. `error` kept it from starting or stopping tasks.
    """

    assignment: Assignment
    tasks: TaskResults = msgspec.field(default_factory=TaskResults)
    noun: str = "workers"
    stopped_by: signal.Signals | None = None
    drained: bool = False
    orphaned: bool = False
    problem: str | None = None
    is_user_error: bool = False
    is_cut_off: bool = False
    error: Exception | None = None


def worker_results(
    assignment: Assignment,
    ranks: RankAssignment | None,
    ends: tuple[WorkerExit, ...],
    succeeded: bool,
    returned: dict[int, bytes],
) -> TaskResults:
    """The results of this node's workers. `ranks` are its last ones, `ends` the exits of its workers of that round."""
    failure = assignment.failure
    root = causes.root_cause(ends)
    owns_failure = False
    if failure is not None and ranks is not None and ranks.key == assignment.key and ranks.has_rank(failure.rank):
        owns_failure = True
        if ranks.nodes > 1:
            # The one that was reported to the other nodes.
            root = next((end for end in ends if end.rank == failure.rank and end.failed), root)
    failed = assignment.phase is PlanPhase.FAILED
    others = [reason for reason in assignment.reasons if not Code.WORKER_FAILED.within([reason])]
    return TaskResults(
        ends=ends,
        root=root,
        owns_failure=owns_failure,
        succeeded=succeeded,
        restarted=ranks is not None and assignment.key.number > 1,
        returned=returned,
        why_over=render(others) if failed else "",
        speaks_for_job=ranks is not None and ranks.node_rank == 0,
    )


ORPHANED = "it was killed, or the program that had started it has ended"
"""Why a launcher ends that could not say so itself."""


def resolve_result(end: JobEnd, scheme: ExitScheme) -> JobResult:
    """The result of a job that is over for this node; `scheme` is that of the exit codes."""
    assignment, tasks = end.assignment, end.tasks
    failed = assignment.phase is PlanPhase.FAILED
    elsewhere = assignment.failure if failed and not tasks.owns_failure else None
    root = None if failed and (elsewhere or assignment.failure is None) else tasks.root
    reason = assignment.reason
    stopped = assignment.phase not in OVER and end.stopped_by is not None
    if (dismissal := _dismissal(end)) is not None:
        reason = dismissal.reason
    elif stopped and end.stopped_by is not None:
        reason = f"{end.stopped_by.name} stopped the job"
        if end.drained or end.orphaned:
            reason = "an operator has drained this node" if end.drained else ORPHANED
    exit_reason = _exit_reason(end, root)
    if exit_reason is ExitReason.WORKER_FAILED and root is not None:
        # A task whose success is a failure of the job, as of a chief without a session, has exit status 0.
        code = root.exit_status or exit_codes.PEER_FAILED
    elif exit_reason is ExitReason.STOPPED and end.stopped_by is not None:
        code = exit_codes.of_signal(end.stopped_by)
    else:
        code = getattr(exit_codes, exit_reason.name)
    return JobResult(
        exit_code=in_scheme(exit_reason, code, scheme, assignment.failure.exit_status if assignment.failure else 0),
        exit_reason=exit_reason,
        reason=reason,
        restarts=assignment.restart_count,
        ends=tasks.ends,
        root=root,
        failure=elsewhere,
        error=_error(end),
        why_over=tasks.why_over,
        stopped=stopped,
        results=tasks.returned,
        failed_here=tasks.failed_here,
        warning=tasks.warning,
        speaks_for_job=tasks.speaks_for_job,
    )


def _dismissal(end: JobEnd) -> Dismissal | None:
    """Why this node leaves, if it was dismissed and nothing else ended its part in the job."""
    is_other_end = end.error is not None or end.stopped_by is not None or end.assignment.phase is PlanPhase.FINISHED
    return None if is_other_end else end.assignment.dismissal


def _exit_reason(end: JobEnd, root: WorkerExit | None) -> ExitReason:
    """Why the launcher ends; the table in docs/launcher.md follows this rule."""
    if isinstance(end.error, NodeRefused):
        return end.error.exit_reason
    if end.error is not None:
        # A mistake in the settings that only a restart has shown does not mean that nothing was started.
        mistake = isinstance(end.error, SpecError) and not end.tasks.restarted
        return ExitReason.BAD_COMMAND_LINE if mistake else ExitReason.CANNOT_START
    phase = end.assignment.phase
    if phase is PlanPhase.FINISHED:
        return ExitReason.SUCCESS
    if (dismissal := _dismissal(end)) is not None:
        return dismissal.exit_reason
    if end.stopped_by is not None:
        return ExitReason.STOPPED
    if phase is PlanPhase.FAILED:
        if root is not None:
            return ExitReason.WORKER_FAILED
        if Code.STOPPED_ON_REQUEST.within(end.assignment.reasons):
            return ExitReason.STOPPED_ON_REQUEST
        return ExitReason.TOO_FEW_NODES if end.assignment.failure is None else ExitReason.PEER_FAILED
    if end.problem is not None:
        if end.tasks.succeeded:
            return ExitReason.SUCCESS
        if end.is_cut_off:
            return ExitReason.CUT_OFF
        return ExitReason.BAD_COMMAND_LINE if end.is_user_error else ExitReason.CANNOT_JOIN
    return ExitReason.INTERNAL_ERROR


def _error(end: JobEnd) -> str | None:
    if isinstance(end.error, OSError):
        return f"the {end.noun} could not be started: {explain_os_error(end.error)}"
    if end.error is not None:
        return str(end.error)
    if (dismissal := _dismissal(end)) is not None:
        return dismissal.error
    assignment = end.assignment
    if assignment.phase is PlanPhase.FAILED and assignment.failure is None:
        stopped = Code.STOPPED_ON_REQUEST.within(assignment.reasons)
        return assignment.reason if stopped else f"the job failed: {assignment.reason}"
    if assignment.phase in OVER or end.problem is None:
        return None
    return f"{end.problem}; all {end.noun} of this node had succeeded by then" if end.tasks.succeeded else end.problem
