"""What follows a stall of a round: a line on the console, events, the stacks in a file, and, on request, a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from dlrover_run.agent.framework import AgentServices
from dlrover_run.agent.round_stragglers import RoundStragglers
from dlrover_run.agent.stall_report import WAITS, StallReport, show_stacks
from dlrover_run.agent.stall_watch import QuietNode, StallWatch
from dlrover_run.agent.worker_round import WorkerRound
from dlrover_run.agent.worker_specs import Worker
from dlrover_run.coordination.combined_records import with_part
from dlrover_run.coordination.model import Assignment, NodeReport
from dlrover_run.events.records import WorkerResumed, WorkerStalled
from dlrover_run.evidence.sample import Sampler
from dlrover_run.policies.stall.model import MAX_SUSPECTS, StallAssignment, StallNodeReport
from dlrover_run.spec import JobSpec, StallAction
from dlrover_run.stall.ask import RoundStacks
from dlrover_run.stall.detector import Detector, Resumed


def watch_stalls(workers: WorkerRound, spec: JobSpec, services: AgentServices) -> RoundStalls | None:
    """Watch the workers of a round for stalls, until `close`; None where they cannot be watched."""
    files, running, ranks = workers.stacks, workers.group.running, workers.ranks
    if files is None or workers.group.ended or (ranks.nodes > 1 and spec.backend == "static"):
        # Static nodes do not communicate, and the rank that one of them names could be wrong.
        return None
    try:
        sampling = Sampler({one.spec.rank: one.pid for one in running}, ranks.store_port)
    except OSError:
        return None  # A kernel without sock_diag.
    stacks = RoundStacks(files, {one.spec.rank: (one.spec.local_rank, one.pid) for one in running})
    response = StallResponse(workers, spec.stall_action, services)
    detector = Detector(spec.stall_timeout, elsewhere=ranks.nodes > 1)
    stragglers = RoundStragglers(workers, services.events, services.wake)
    stalls = RoundStalls(workers, services.wake, stragglers)
    on_quiet = stalls.note_quiet if ranks.nodes > 1 else None
    watch = StallWatch(
        detector,
        sampling,
        stacks,
        response.on_stall,
        response.on_resume,
        workers.progress.steps,
        on_quiet,
        stragglers.observe if ranks.world_size > 1 else None,
    )
    stalls.begin(watch)
    return stalls


class RoundStalls:
    """The watch of one round, and what this node and the coordinator exchange about it. `wake` has a report built."""

    def __init__(
        self, workers: WorkerRound, wake: Callable[[], None], stragglers: RoundStragglers | None = None
    ) -> None:
        self._workers = workers
        self._wake = wake
        self._stragglers = stragglers
        self._watch: StallWatch | None = None
        self._task: asyncio.Task[None] | None = None
        self._part: StallNodeReport | None = None
        self._confirmed = 0

    def begin(self, watch: StallWatch) -> None:
        """Begin to watch."""
        self._watch = watch
        self._task = asyncio.ensure_future(watch.run())

    def note_end(self, worker: Worker) -> None:
        """A worker has ended. After a failure, or when workers are stopped, the others only wait for their own end."""
        if worker.code != 0 or worker.stopped_with is not None or not self._workers.group.running:
            self.close()
        elif self._watch is not None:
            self._watch.note_end(worker.spec.rank)

    def note_quiet(self, quiet: QuietNode | None) -> None:
        """Report that the workers of this node make no progress, or that they do again."""
        if quiet is None or len(quiet.suspects) > MAX_SUSPECTS:
            self._part = None
        else:
            self._part = StallNodeReport(quiet.number, quiet.trains, quiet.suspects)
        self._wake()

    def add_to_report(self, report: NodeReport) -> NodeReport:
        """A report of this node together with what the watch has found in the round that it is about."""
        if not report.in_round(self._workers.key):
            return report
        if self._stragglers is not None and self._task is not None:
            report = self._stragglers.add_to_report(report)
        if self._part is None:
            return report
        return msgspec.structs.replace(report, policy=with_part(report.policy, self._part))

    def follow(self, assignment: Assignment) -> None:
        """Take what the coordinator has found, each finding once."""
        if self._stragglers is not None and self._task is not None:
            self._stragglers.follow(assignment)
        part = StallAssignment.find(assignment.policy)
        # Without a part of its own the finding crossed the report that the workers of this node make progress again.
        if self._watch is None or self._part is None or part is None:
            return
        found = part.finding
        if found.key == self._workers.key and found.number > self._confirmed:
            self._confirmed = found.number
            self._watch.confirm(found.ranks, found.reasons, found.to_restart, found.nodes)

    def close(self) -> None:
        """End the watch. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._watch = None
        self._part = None


class StallResponse:
    """The response to the stalls of one round. Each action includes those before it: report, dump, restart."""

    def __init__(self, workers: WorkerRound, action: StallAction, services: AgentServices) -> None:
        self._workers = workers
        self._action = action
        self._services = services

    def on_stall(self, report: StallReport) -> None:
        """Report a stall, and carry out the action. Workers that are being stopped have their own timeout."""
        stopping = any(worker.stopped_with is not None for worker in self._workers.group.running)
        if stopping or self._services.shutdown.wanted:
            return
        ranks = self._workers.ranks
        codes = [reason.code for reason in report.reasons]
        self._workers.stalled = {
            worker.spec.rank: codes[0] if codes and worker.spec.rank in report.guilty else WAITS
            for worker in self._workers.group.running
        }
        for worker in self._workers.group.running:
            guilty = worker.spec.rank in report.guilty
            self._services.events.emit(
                WorkerStalled(
                    round=ranks.round,
                    rank=worker.spec.rank,
                    local_rank=worker.spec.local_rank,
                    since=report.stalled.since,
                    reasons=report.reasons if guilty else (),
                    guilty=guilty,
                )
            )
        self._services.console.info(report.line)
        if self._action in ("dump", "restart"):
            show_stacks(report, f"round {ranks.round}", self._services.run_dir, self._services.console)
        if self._action == "restart":
            here = [one.spec.rank for one in self._workers.group.running if one.spec.rank in report.to_restart]
            if here:
                self._services.console.info("the worker is killed, and its round ends (--stall-action=restart)")
                self._workers.kill(here, "--stall-action=restart, as it made no progress")

    def on_resume(self, resumed: Resumed) -> None:
        """Report that the workers make progress again."""
        self._workers.stalled = {}
        for worker in self._workers.group.running:
            self._services.events.emit(
                WorkerResumed(round=self._workers.ranks.round, rank=worker.spec.rank, local_rank=worker.spec.local_rank)
            )
        self._services.console.info(f"the workers make progress again, after {resumed.seconds:.0f} s")
