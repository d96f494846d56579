"""The result of a job on this node: the exit code, how the workers ended, and what they returned."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from dlrover_run import exit_codes, failures
from dlrover_run.agent.os_errors import explain_os_error
from dlrover_run.coordination.model import OVER, Assignment, Failure, PlanPhase, RankAssignment
from dlrover_run.coordination.reasons import Code, render
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.policies.health import model as check_records
from dlrover_run.policies.health.model import NodeHealth
from dlrover_run.spec import SpecError


@dataclass(frozen=True)
class JobResult:
    """The result of a job on this node. `results` are the pickled return values of a function launch, by global rank.

    `root` is the worker of this node that failed first, `failure` the failure of another node, if any. `error` is a
    sentence if the job, or this node's part in it, was not ended by a worker. `why_over` is a clause that says why no
    other round followed the failure. `stopped` is true if a signal made this node leave.
    """

    exit_code: int
    reason: str
    restarts: int = 0
    ends: tuple[WorkerExit, ...] = ()
    root: WorkerExit | None = None
    failure: Failure | None = None
    error: str | None = None
    why_over: str = ""
    stopped: bool = False
    results: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class JobEnd:
    """Everything that the result depends on.

    `assignment` is the last one of the coordinator and `ranks` the last ranks of this node. `ends` are the exits of its
    workers of that round; `succeeded` is true if all of them succeeded. `stopped_by` is a signal that made this node
    leave. `problem` says why it could not take part in the job, and `mistaken` that the cause is the user's settings.
    `gave_up` is the error that kept it from starting or stopping workers.
    """

    assignment: Assignment
    ranks: RankAssignment | None
    ends: tuple[WorkerExit, ...]
    succeeded: bool
    results: dict[int, bytes]
    stopped_by: signal.Signals | None
    problem: str | None
    gave_up: Exception | None
    mistaken: bool = False


def resolve_result(ending: JobEnd, compat: bool) -> JobResult:
    """The result of a job that is over for this node; with `compat`, torchrun's exit codes."""
    wanted = ending.assignment
    failed = wanted.phase is PlanPhase.FAILED
    elsewhere = wanted.failure if failed and not _is_own(wanted.failure, ending) else None
    root = None if failed and (elsewhere or wanted.failure is None) else _own_root(ending)
    reason = wanted.reason
    stopped = wanted.phase not in OVER and ending.stopped_by is not None
    if (checkup := _dismissal(ending)) is not None:
        reason = f"the node check dismissed this node: {checkup.reason}"
    elif stopped and ending.stopped_by is not None:
        reason = f"{ending.stopped_by.name} stopped the job"
    return JobResult(
        exit_code=_exit_code(ending, root, compat),
        reason=reason,
        restarts=wanted.restart_count,
        ends=ending.ends,
        root=root,
        failure=elsewhere,
        error=_error(ending),
        why_over=render([one for one in wanted.reasons if not Code.WORKER_FAILED.within([one])]) if failed else "",
        stopped=stopped,
        results=ending.results,
    )


def _dismissal(ending: JobEnd) -> NodeHealth | None:
    """The health check result of this node if it leaves because of it, else None."""
    checkup = ending.assignment.health
    if checkup is None or not checkup.dismissed or ending.assignment.phase is PlanPhase.FINISHED:
        return None
    return checkup if ending.gave_up is None and ending.stopped_by is None else None


def _explain_dismissal(checkup: NodeHealth) -> str:
    """The line that DLRover prints, which users search for, and below it the reason and what to do."""
    reason = checkup.reason or "no reason was given"
    if checkup.status is check_records.HealthStatus.STRAGGLER:
        advice = "put another machine in its place, or leave --exclude-straggler out to train at its pace"
        return (
            f"RuntimeError: The node is a straggler and exits.\n  The node check found it too slow: {reason}; {advice}."
        )
    advice = "repair it or put another machine in its place"
    return f"RuntimeError: The node network is breakdown.\n  The node check found it broken: {reason}; {advice}."


def _start_problem(error: Exception) -> str:
    """Why this node could not start or stop its workers, as a sentence."""
    return f"the workers could not be started: {explain_os_error(error)}" if isinstance(error, OSError) else str(error)


def _is_own(failure: Failure | None, ending: JobEnd) -> bool:
    ranks = ending.ranks
    if failure is None or ranks is None or ranks.key != ending.assignment.key:
        return False
    return ranks.has_rank(failure.rank)


def _own_root(ending: JobEnd) -> WorkerExit | None:
    """The worker of this node that failed first. With several nodes it is the one that was reported to them."""
    named = ending.assignment.failure
    if named is not None and ending.ranks is not None and ending.ranks.nodes > 1 and _is_own(named, ending):
        return _of_rank(ending.ends, named.rank) or failures.root_cause(ending.ends)
    return failures.root_cause(ending.ends)


def _of_rank(ends: Sequence[WorkerExit], rank: int) -> WorkerExit | None:
    return next((end for end in ends if end.rank == rank and end.failed), None)


def _exit_code(ending: JobEnd, root: WorkerExit | None, compat: bool) -> int:
    """The launcher's exit code; the table in docs/launcher.md follows this rule."""
    if ending.gave_up is not None:
        # A mistake in the settings that only a restart has shown does not mean that nothing was started.
        first = ending.ranks is None or ending.assignment.key.number <= 1
        mistake = isinstance(ending.gave_up, SpecError) and first
        return exit_codes.BAD_COMMAND_LINE if mistake else exit_codes.of_failure(exit_codes.CANNOT_START, compat)
    phase = ending.assignment.phase
    if phase is PlanPhase.FINISHED:
        return exit_codes.SUCCESS
    if (checkup := _dismissal(ending)) is not None:
        straggler = checkup.status is check_records.HealthStatus.STRAGGLER
        return exit_codes.of_failure(exit_codes.STRAGGLER if straggler else exit_codes.FAULTY_NODE, compat)
    if ending.stopped_by is not None:
        return exit_codes.of_failure(exit_codes.of_signal(ending.stopped_by), compat)
    if phase is PlanPhase.FAILED:
        if root is not None:
            code = root.exit_status
        else:
            code = exit_codes.TOO_FEW_NODES if ending.assignment.failure is None else exit_codes.PEER_FAILED
    elif ending.problem is not None:
        if ending.succeeded:
            return exit_codes.SUCCESS
        if ending.mistaken:
            return exit_codes.BAD_COMMAND_LINE
        code = exit_codes.CANNOT_JOIN
    else:
        code = exit_codes.INTERNAL_ERROR
    return exit_codes.of_failure(code, compat)


def _error(ending: JobEnd) -> str | None:
    if ending.gave_up is not None:
        return _start_problem(ending.gave_up)
    if (checkup := _dismissal(ending)) is not None:
        return _explain_dismissal(checkup)
    wanted = ending.assignment
    if wanted.phase is PlanPhase.FAILED and wanted.failure is None:
        return f"the job failed: {wanted.reason}"
    if wanted.phase in OVER or ending.problem is None:
        return None
    return f"{ending.problem}; all workers of this node had succeeded by then" if ending.succeeded else ending.problem
