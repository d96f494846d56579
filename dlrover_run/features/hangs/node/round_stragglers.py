"""The stragglers of one round as its node sees them: what its workers wait for goes into its report, and which of them
are stragglers comes back in its assignment, and goes into the event log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.events.records import Events, StragglerFound, StragglerGone
from dlrover_run.features.hangs.stragglers.model import MAX_REPORTED, StragglerAssignment, StragglerNodeReport
from dlrover_run.features.hangs.stragglers.shares import NodeShares, WorkerSample
from dlrover_run.observe.page import Progress
from dlrover_run.observe.records import Evidence
from dlrover_run.observe.waits import MainThread, read_main_thread
from dlrover_run.workers.round import WorkerRound


class RoundStragglers:
    """The workers of this node in one round. `wake` has a report built, `progress` returns what
    workers have done by rank, and `read` reads a worker's main thread."""

    def __init__(
        self,
        workers: WorkerRound,
        events: Events,
        wake: Callable[[], None],
        progress: Callable[[], Mapping[int, Progress]],
        read: Callable[[int, bool], MainThread | None] = read_main_thread,
    ) -> None:
        self._workers = workers
        self._events = events
        self._wake = wake
        self._progress = progress
        self._read = read
        self._shares = NodeShares()
        self._found: set[int] = set()

    def observe(self, samples: Sequence[Evidence]) -> None:
        """Take the evidence of all workers at one time, and look at their main threads."""
        at = samples[0].at
        is_boundary = self._shares.is_boundary(at)
        waited = {rank: done.waited for rank, done in self._progress().items()} if is_boundary else {}
        pids = {one.spec.rank: one.pid for one in self._workers.group.running}
        found = []
        for one in samples:
            thread = self._read(pids[one.rank], is_boundary) if one.rank in pids else None
            if thread is not None:
                traffic = one.traffic
                exchanged = traffic.acked + traffic.received
                found.append(
                    WorkerSample(
                        one.rank, thread.waits, thread.queued, waited.get(one.rank, 0.0), exchanged, traffic.unsent
                    )
                )
        if self._shares.add(found, at):
            self._wake()

    def add_to_report(self, report: NodeReport) -> NodeReport:
        """A report of this round together with the shares of its workers."""
        shares = self._shares.current
        if not shares or len(shares) > MAX_REPORTED:
            return report
        return replace(report, parts=with_part(report.parts, StragglerNodeReport(shares)))

    def follow(self, assignment: Assignment) -> None:
        """Emit what has changed among the stragglers of this node; the same assignment may come again."""
        if assignment.ranks is None or assignment.ranks.key != self._workers.key:
            return
        part = StragglerAssignment.find(assignment.parts)
        found = {} if part is None or part.key != self._workers.key else {one.rank: one for one in part.found}
        ranks = self._workers.ranks
        for rank in sorted(self._found - found.keys()):
            self._events.emit(StragglerGone(round=ranks.round, rank=rank, local_rank=rank - ranks.first_rank))
        for rank in sorted(found.keys() - self._found):
            self._events.emit(
                StragglerFound(
                    round=ranks.round,
                    rank=rank,
                    local_rank=rank - ranks.first_rank,
                    reasons=found[rank].reasons,
                )
            )
        self._found = set(found)
