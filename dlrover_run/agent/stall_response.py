"""What follows a stall of a round: a line on the console, events, the stacks in a file, and, on request, a restart."""

from __future__ import annotations

import os
from collections.abc import Coroutine

from dlrover_run.agent.framework import AgentServices
from dlrover_run.agent.stall_watch import StallReport, StallWatch
from dlrover_run.agent.worker_round import WorkerRound
from dlrover_run.events.records import WorkerResumed, WorkerStalled
from dlrover_run.evidence.sample import Sampler
from dlrover_run.spec import JobSpec, StallAction
from dlrover_run.stall.ask import RoundStacks, StackFiles
from dlrover_run.stall.detector import Detector

STACKS_FILE = "stacks.txt"
"""The file in the directory of the run to which the stacks of each stall are appended."""


def watch_stalls(
    workers: WorkerRound, spec: JobSpec, services: AgentServices, files: StackFiles
) -> Coroutine[None, None, None] | None:
    """What watches the workers of a round for stalls; None where they cannot be watched."""
    if workers.ranks.nodes > 1:
        # Without the evidence of the other nodes the rank that it names could be wrong.
        return None
    running = workers.group.running
    try:
        sampling = Sampler({one.spec.rank: one.pid for one in running}, workers.ranks.store_port)
    except OSError:
        return None  # A kernel without sock_diag.
    stacks = RoundStacks(files, {one.spec.rank: (one.spec.local_rank, one.pid) for one in running})
    response = StallResponse(workers, spec.stall_action, services)
    detector = Detector(spec.stall_timeout)
    return StallWatch(detector, sampling, stacks, response.on_stall, response.on_resume, workers.steps).run()


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
        for worker in self._workers.group.running:
            guilty = worker.spec.rank in report.guilty
            self._services.events.emit(
                WorkerStalled(
                    round=ranks.round,
                    rank=worker.spec.rank,
                    local_rank=worker.spec.local_rank,
                    since=report.stalled.since,
                    reasons=report.finding.reasons if guilty else (),
                    guilty=guilty,
                )
            )
        self._services.console.info(report.line)
        if self._action in ("dump", "restart"):
            self._dump(report)
        if self._action == "restart":
            # Without a guilty rank any failure ends the round; the first rank's is as good as another's.
            chosen = report.guilty or report.stalled.ranks[:1]
            self._services.console.info("the worker is killed, and its round ends (--stall-action=restart)")
            self._workers.kill(chosen)

    def on_resume(self, seconds: float) -> None:
        """Report that the workers make progress again."""
        for worker in self._workers.group.running:
            self._services.events.emit(
                WorkerResumed(round=self._workers.ranks.round, rank=worker.spec.rank, local_rank=worker.spec.local_rank)
            )
        self._services.console.info(f"the workers make progress again, after {seconds:.0f} s")

    def _dump(self, report: StallReport) -> None:
        run_dir = self._services.run_dir
        if run_dir.keep and run_dir.path is not None:
            path = os.path.join(run_dir.path, STACKS_FILE)
            try:
                with open(path, "a") as file:
                    file.write(f"round {self._workers.ranks.round}: {report.line}\n{report.text}\n\n")
            except OSError as error:
                self._services.console.info(f"the stacks cannot be written to {path} ({error.strerror})")
            else:
                self._services.console.info(f"stacks of all ranks in {path}")
                return
        for line in report.text.splitlines():
            self._services.console.info(line)
