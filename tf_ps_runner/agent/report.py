"""What a user reads of a job on this node: one line for each event, and the results of the tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dlrover_run.agent.result import TaskResults, describe_unused
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.round import Failure
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.words.log_level import internal_error, log_frames
from dlrover_run.words.reasons import Reasons, new_reasons, render, sentences
from tf_ps_runner.agent.protocol import Note, Restored, Saved
from tf_ps_runner.cluster.model import EndCause, Role, TaskEnd, TaskKey
from tf_ps_runner.cluster.orders import SHORT_END, NodeOrder
from tf_ps_runner.cluster.text import ClusterCode


def task_results(assignment: Assignment, ends: tuple[tuple[TaskEnd, WorkerExit], ...], host: str) -> TaskResults:
    """The results of the tasks of this node, which is named `host`. `ends` are their last ends, as reported and as
    observed, in that order."""
    failure = assignment.failure if assignment.phase is PlanPhase.FAILED else None
    root = _own_root(ends, failure, host)
    return TaskResults(
        root=root,
        owns_failure=root is not None,
        failed_here=failure is not None and failure.host == host,
        why_over=_why_over(assignment, root) if assignment.phase is PlanPhase.FAILED else "",
        warning=_warning(assignment, is_unused=not ends),
        speaks_for_job=any(task.name.startswith(f"{Role.CHIEF.value}-") for _, task in ends),
    )


def _own_root(ends: Sequence[tuple[TaskEnd, WorkerExit]], failure: Failure | None, host: str) -> WorkerExit | None:
    """The end of the task that the coordinator names, if it was one of this node's."""
    if failure is None or failure.host != host:
        return None
    for reported, end in reversed(ends):
        # A coordinator that recovered from short reports knows only those. The rank alone would not do: chief-0,
        # worker-0 and ps-0 all have rank 0, and one signal may end all of them in the same way.
        if (not failure.task or end.name == failure.task) and (
            end.rank == failure.rank and failure.exit_text in (reported.exit_text, reported.exit_text[:SHORT_END])
        ):
            return end
    return None


def _why_over(assignment: Assignment, root: WorkerExit | None) -> str:
    """The last of the coordinator's sentences, without the end of the task that the report describes itself."""
    shown_already = (ClusterCode.LOST.code, ClusterCode.MORE_LOST.code) if root is not None else ()
    return render([one for last in sentences(assignment.reasons)[-1:] for one in last if one.code not in shown_already])


def _warning(assignment: Assignment, is_unused: bool) -> str | None:
    if assignment.phase is not PlanPhase.FINISHED:
        return None
    failed = [render((reason,)) for reason in assignment.reasons if reason.code == ClusterCode.PURPOSE_FAILED.code]
    if failed:
        return f"warning: {'; '.join(failed)}"
    why = "other nodes had all tasks of the job, and this one waited as a spare"
    return describe_unused("task", why) if is_unused else None


class EventPrinter:
    """Prints a line for each event of this node's tasks and of the cluster, with `log`."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._reasons: Reasons = ()
        self._logged_watch = False
        self._failed: set[str] = set()
        self._order: NodeOrder | None = None

    def show_internal_error(self, what: str, error: Exception) -> None:
        """Print what fails beside the tasks, once; it is tried again."""
        if what not in self._failed:
            self._failed.add(what)
            self._log(f"warning: {what}: {internal_error(error)}; the launcher tries again")
            log_frames(self._log, error)

    def follow(self, assignment: Assignment) -> None:
        order = NodeOrder.find(assignment.parts)
        if order is None:
            return
        self._order = order
        before, self._reasons = self._reasons, assignment.reasons
        if self._reasons != before:
            self._log(render(new_reasons(before, self._reasons)))

    def memory_limited(self, kept_by: str) -> None:
        """A task has a memory limit that is enforced in this way (`MemoryEnforcer.kept_by`)."""
        if kept_by == "watch" and not self._logged_watch:
            self._logged_watch = True
            self._log(
                "warning: no control group can be made here, so processes are looked at for their memory, and a fast "
                "one takes more than its limit before it is killed"
            )

    def task_ended(self, key: TaskKey, end: TaskEnd, step: int) -> None:
        """A process has ended; `step` is its last known step, -1 if it reported none."""
        if key.role is Role.CHIEF and end.cause is EndCause.SUCCESS and step < 0:
            self._log(
                f"warning: {key} has succeeded without a session in the cluster: does the script read TF_CONFIG? One "
                "that does not trains alone in each of its processes"
            )

    def task_message(self, key: TaskKey, event: Note | Restored | Saved) -> None:
        """A process has sent a message for the user, which the channel has made safe for a terminal."""
        if isinstance(event, Note):
            self._log(f"{key}: {event.text}")
        elif isinstance(event, Saved):
            if self._order is not None and self._order.save:
                self._log(f"{key} has saved step {event.step}: {event.path}")
        else:
            for sentence in event.skipped:
                self._log(f"{key}: {sentence}")
            self._log(f"{key}: {_model(event)}")


def _model(event: Restored) -> str:
    # The coordinator reports how many steps were lost, because it knows the reports of all nodes.
    known = event.step >= 0
    if event.how == "checkpoint":
        return f"has restored {event.path or '?'}, and goes on{f' after step {event.step}' if known else ''}"
    if event.how == "live":
        # Without a step of its own, the script decides: Keras' BackupAndRestore goes back to the beginning of an epoch.
        rest = f" at step {event.step}; no step lost" if known else "; the script decides from where"
        return f"goes on with the live model{rest}"
    if event.step > 0:
        return f"begins at step {event.step}, with a model that the script has restored by itself"
    return f"begins with a fresh model{' at step 0' if known else ''}"
