"""What a finished job tells whoever called for it: the exit code, and the task that ended it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from dlrover_run import exit_codes
from dlrover_run.agent.refusal import explain
from dlrover_run.coordination.records import OVER, Assignment, Failure, PlanPhase
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.policies.parameter_servers.ending import EVALUATION_FAILED
from dlrover_run.policies.parameter_servers.model import TaskEnd
from dlrover_run.policies.parameter_servers.recovery import SHORT_END
from dlrover_run.spec import SpecError


@dataclass(frozen=True)
class Verdict:
    """The end of a job on this node. `root` is the task of this node that the job could not go on after, `failure` what
    is known of one on another node; `error` is a sentence when it was no task that ended the job, or this node's part
    in it. `why_over` is a clause that says why that end was not followed by another start. `warning` is a sentence
    about a job that has succeeded all the same."""

    exit_code: int
    reason: str
    root: WorkerExit | None = None
    failure: Failure | None = None
    error: str | None = None
    why_over: str = ""
    warning: str | None = None


@dataclass(frozen=True)
class Ending:
    """All that the verdict depends on.

    `wanted` is the coordinator's last word. `ends` are the last ends of this node's tasks, as they were told and as
    they were observed, in that order, and `host` is what this node is called. `stopped_by` is a signal that told this
    node to go, `problem` why it could take no part in the job, which is `mistaken` if the person's settings are why;
    `gave_up` is what kept it from starting or stopping tasks.
    """

    wanted: Assignment
    ends: tuple[tuple[TaskEnd, WorkerExit], ...]
    host: str
    stopped_by: signal.Signals | None
    problem: str | None
    gave_up: Exception | None
    mistaken: bool = False


def judge(ending: Ending, compat: bool) -> Verdict:
    """The verdict on a job that is over for this node; `compat` asks for one code for all failures."""
    wanted = ending.wanted
    failed = wanted.phase is PlanPhase.FAILED
    root = _own_root(ending.ends, wanted.failure, ending.host) if failed else None
    stopped = wanted.phase not in OVER and ending.stopped_by is not None
    reason = wanted.reason
    if stopped and ending.stopped_by is not None:
        reason = f"{ending.stopped_by.name} stopped the job"
    return Verdict(
        exit_code=_exit_code(ending, root, compat),
        reason=reason,
        root=root,
        failure=wanted.failure if failed and root is None else None,
        error=_error(ending),
        why_over=_why_over(wanted, root) if failed else "",
        warning=_warning(wanted),
    )


def _own_root(ends: Sequence[tuple[TaskEnd, WorkerExit]], failure: Failure | None, host: str) -> WorkerExit | None:
    """The end of the task that the coordinator names, if that was one of this node's."""
    if failure is None or failure.host != host:
        return None
    for told, end in reversed(ends):
        # A coordinator that had been heard of with few words knows only those.
        if end.rank == failure.rank and failure.what in (told.what, told.what[:SHORT_END]):
            return end
    return None


def _why_over(wanted: Assignment, root: WorkerExit | None) -> str:
    """The coordinator's sentence without its first part, which says what the report says in its own words."""
    _, separator, rest = wanted.reason.rpartition("; ")
    return rest if separator else "" if root is not None else wanted.reason


def _warning(wanted: Assignment) -> str | None:
    if wanted.phase is PlanPhase.FINISHED and EVALUATION_FAILED in wanted.reason:
        return f"warning: {EVALUATION_FAILED}"
    return None


def _exit_code(ending: Ending, root: WorkerExit | None, compat: bool) -> int:
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


def _error(ending: Ending) -> str | None:
    gave_up, wanted = ending.gave_up, ending.wanted
    if gave_up is not None:
        return f"the tasks could not be started: {explain(gave_up)}" if isinstance(gave_up, OSError) else str(gave_up)
    if wanted.phase is PlanPhase.FAILED and wanted.failure is None:
        return f"the job failed: {wanted.reason}"
    return None if wanted.phase in OVER else ending.problem
