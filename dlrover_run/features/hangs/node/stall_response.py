"""What follows from a stall of a round: a line on the console, events, stacks in a file, and, on request, a restart."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dlrover_run.agent.framework import AgentServices
from dlrover_run.coordination.records.activity import WAITS
from dlrover_run.events.records import WorkerResumed, WorkerStalled
from dlrover_run.features.hangs.collectives.evidence import Evidence
from dlrover_run.features.hangs.collectives.text import position_lines
from dlrover_run.features.hangs.node.kept_evidence import keep_evidence
from dlrover_run.features.hangs.node.stall_report import StallReport, show_stacks
from dlrover_run.features.hangs.search.codes import awaited_operation, shown_code
from dlrover_run.features.hangs.search.detector import Resumed
from dlrover_run.features.hangs.settings import StallAction
from dlrover_run.words.text import format_ranks
from dlrover_run.workers.round import WorkerRound


class StallResponse:
    """The response to the stalls of one round. Each action includes those before it: report, dump, restart. `evidence`
    returns what was read last of the collectives. `awaited` is the operation in which workers wait for the guilty ones
    of the present stall, empty if that is not known."""

    def __init__(
        self,
        workers: WorkerRound,
        action: StallAction,
        services: AgentServices,
        evidence: Callable[[], Evidence] = Evidence,
    ) -> None:
        self._workers = workers
        self._action = action
        self._services = services
        self._evidence = evidence
        self.awaited = ""

    def on_stall(self, report: StallReport) -> None:
        """Report a stall, and carry out the action. Workers that are being stopped have their own timeout."""
        stopping = any(worker.stopped_with is not None for worker in self._workers.group.running)
        if stopping or self._services.shutdown.requested:
            return
        ranks = self._workers.ranks
        # While others train nothing was asked.
        evidence = Evidence() if report.is_alone else self._evidence()
        code = shown_code(report.reasons)
        self.awaited = awaited_operation(report.reasons)
        stalled = [
            worker
            for worker in self._workers.group.running
            if not report.is_alone or worker.spec.rank in report.stalled.ranks
        ]
        marks = {one.spec.rank: code if code and one.spec.rank in report.guilty else WAITS for one in stalled}
        before = self._workers.stalled if report.is_alone else {}
        self._workers.stalled = {**before, **marks}
        for worker in stalled:
            if before.get(worker.spec.rank) == marks[worker.spec.rank]:
                continue
            guilty = worker.spec.rank in report.guilty
            self._services.events.emit(
                WorkerStalled(
                    round=ranks.round,
                    rank=worker.spec.rank,
                    local_rank=worker.spec.local_rank,
                    since=report.stalled.since,
                    reasons=report.reasons if guilty else (),
                    guilty=guilty,
                    collectives=tuple(map(msgspec.to_builtins, evidence.positions.get(worker.spec.rank, ()))),
                )
            )
        if report.is_alone and all(before.get(rank) == code for rank in report.guilty if rank in marks):
            # Another worker waits for them now.
            return
        self._services.console.info(report.line)
        if self._action in ("dump", "restart"):
            places = position_lines(evidence.positions, report.names or format_ranks)
            show_stacks(report, f"round {ranks.round}", self._services.run_dir, self._services.console, places)
            self._keep_evidence(evidence, ranks.round)
        if self._action == "restart":
            self._restart(report)

    def _keep_evidence(self, evidence: Evidence, round_number: int) -> None:
        """Keep what NCCL and torch have said of the collectives."""
        try:
            folder = keep_evidence(evidence, round_number, self._services.run_dir)
        except OSError as error:
            self._services.console.info(f"what NCCL has reported cannot be kept ({error.strerror or error})")
        else:
            if folder is not None:
                self._services.console.info(f"where each rank is in its collectives: {folder}")

    def _restart(self, report: StallReport) -> None:
        """Kill the workers of this node that end the round. One that the evidence does not name is killed only because
        any failure ends the round, and no message calls it the cause."""
        here = tuple(one.spec.rank for one in self._workers.group.running if one.spec.rank in report.to_restart)
        if not here:
            return
        if set(here) <= set(report.guilty):
            self._services.console.info("the worker is killed, and its round ends (--stall-action=restart)")
            self._workers.kill(here, "--stall-action=restart, as it made no progress")
        else:
            self._services.console.info(
                f"no rank that runs is named: {format_ranks(here)} is killed, so that the round restarts "
                "(--stall-action=restart)"
            )
            self._workers.kill(here, "--stall-action=restart to restart the round, as no rank that runs is named")

    def on_resume(self, resumed: Resumed) -> None:
        """Report that the workers make progress again. With `alone` some were quiet, and perhaps never reported."""
        before = self._workers.stalled
        ranks = before.keys() & set(resumed.ranks)
        if resumed.alone and not ranks:
            return
        self._workers.stalled = {rank: code for rank, code in before.items() if resumed.alone and rank not in ranks}
        self.awaited = ""
        for worker in self._workers.group.running:
            if not resumed.alone or worker.spec.rank in ranks:
                self._services.events.emit(
                    WorkerResumed(
                        round=self._workers.ranks.round, rank=worker.spec.rank, local_rank=worker.spec.local_rank
                    )
                )
        whose = format_ranks(tuple(sorted(ranks))) if resumed.alone else "the workers"
        verb = "makes" if resumed.alone and len(ranks) == 1 else "make"
        self._services.console.info(f"{whose} {verb} progress again, after {resumed.seconds:.0f} s")
