"""Prints the progress of the job: what the node waits for, the start of each round, and why there is another one. With
`--event-log-handler=console`, writes torchrun's events as well."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

from dlrover_run.agent.host import host_name
from dlrover_run.console import rounds
from dlrover_run.console.console import Console, is_verbose
from dlrover_run.coordination.records.assignment import Assignment, Waiting
from dlrover_run.coordination.records.plan import OVER, PlanPhase
from dlrover_run.coordination.records.round import RankAssignment
from dlrover_run.failures import causes
from dlrover_run.output.run_directory import RunDir
from dlrover_run.spec import JobSpec
from dlrover_run.words.reasons import Code, render
from dlrover_run.workers.feature import WaitDetails
from dlrover_run.workers.round import WorkerRound


class ProgressReporter:
    """Prints the progress of one node on `console`. `details` returns what prints more about a wait, if anything."""

    def __init__(
        self, spec: JobSpec, console: Console, details: Callable[[], WaitDetails | None] = lambda: None
    ) -> None:
        self._details = details
        self._spec = spec
        self._console = console
        self._waiting: Waiting | None = None
        self._place: tuple[int, ...] | None = None
        self._verbose = is_verbose(os.environ)

    def begin(self, run_dir: RunDir) -> None:
        """Print at the start where the logs are; nothing if no log file is kept, as with torchrun."""
        if run_dir.path is not None and run_dir.keep:
            self._console.info(rounds.render_start(self._spec.workers_per_node, run_dir.path, self._spec.logs))

    def update(self, assignment: Assignment) -> None:
        """Show what a node without ranks waits for, with the time left, and the details once."""
        details = self._details()
        if details is not None:
            details.before(assignment)
        waiting = assignment.waiting if assignment.ranks is None and assignment.phase not in OVER else None
        if waiting != self._waiting:
            self._waiting = waiting
            if waiting is None:
                self._console.clear_waiting()
            elif details is None:
                self._console.show_waiting(waiting.text, waiting.seconds, None)
            else:
                self._console.show_waiting(waiting.text, waiting.seconds, details.table(waiting))
                details.news(waiting)
        if details is not None:
            details.after(assignment)

    def begin_round(self, ranks: RankAssignment) -> None:
        """Print that a round begins: one line on the node with rank 0, and on each node whose ranks are others than
        before. Scripts search logs for torchrun's block of twelve lines, which the node with rank 0 prints once. With
        LOGLEVEL=INFO all nodes print both for each round."""
        place = (ranks.first_rank, ranks.workers, ranks.world_size, ranks.node_rank, ranks.nodes)
        is_first, is_same = self._place is None, place == self._place
        self._place = place
        if not self._spec.single_node and (self._verbose or ranks.node_rank == 0 or not is_same):
            self._console.info(rounds.render_rank_assignment(ranks))
        has_peers = self._spec.rendezvous.coordinated
        if self._verbose or (has_peers and ranks.node_rank == 0 and is_first):
            self._console.info(rounds.render_rendezvous(ranks, self._spec.event_log))

    def end_round(self, ended: WorkerRound, assignment: Assignment, ranks: RankAssignment) -> None:
        """Print why a round has ended; `ranks` are this node's in the next one. The node whose worker failed knows
        most of it, and the node with rank 0 has the lines of the whole job. The others print it with LOGLEVEL=INFO:
        a job of 64 nodes, whose scheduler merges their output, would have the line 64 times."""
        failed_here = assignment.failure is not None and ended.ranks.has_rank(assignment.failure.rank)
        # A master without a journal counts restarts from 0.
        is_restart = ranks.restart_count > ended.ranks.restart_count
        # On a console that the nodes share, the line of the node that failed is enough.
        is_for_all = ranks.node_rank == 0 and not (is_restart and self._spec.console_name)
        if not (self._verbose or is_for_all or (is_restart and failed_here)):
            return
        if not is_restart:
            self._console.error(rounds.render_membership_change(assignment.reason, ranks, ended.lasted))
            return
        reason, failure = assignment.reason, assignment.failure
        if failure is None or failed_here:
            # All exits of this node are known by now, and the name of the only node is left out.
            root = causes.root_cause(ended.ends)
            if root:
                own = Code.SENTENCE(text=f"rank {root.rank} {causes.describe_exit(root)}")
                reason = render((own, *assignment.reasons[1:]))
        rules = self._spec.rules
        line = rounds.render_restart(
            reason, ranks.restart_count, rules.max_restarts, ended.lasted, rules.restart_window
        )
        self._console.error(line)


class EventLog:
    """One JSON line on standard error for each event of the job, in torchrun's form; nothing without the flag."""

    def __init__(self, spec: JobSpec, write: Callable[[str], None]) -> None:
        self._spec = spec
        self._write = write
        self._started = time.monotonic()
        self._group_rank = spec.node_rank

    def round_started(self, ranks: RankAssignment) -> None:
        """The workers of a round have been started."""
        self._group_rank = ranks.node_rank
        self._emit("RUNNING", ranks.restart_count, "")

    def job_ended(self, phase: PlanPhase, restarts: int, reason: str) -> None:
        """The job is over for this node; one that a signal stopped counts as failed, as with torchrun."""
        self._emit("SUCCEEDED" if phase is PlanPhase.FINISHED else "FAILED", restarts, reason)

    def _emit(self, state: str, restarts: int, reason: str) -> None:
        if self._spec.event_log != "console":
            return
        event = {
            "name": f"torchelastic.worker.status.{state}",
            "source": "AGENT",
            "timestamp": int(time.time() * 1000),
            "metadata": {
                "run_id": self._spec.run_id,
                "global_rank": None,
                "group_rank": self._group_rank,
                "worker_id": None,
                "role": self._spec.role,
                "hostname": host_name(),
                "state": state,
                "total_run_time": int(time.monotonic() - self._started),
                "rdzv_backend": self._spec.rendezvous.backend,
                "raw_error": reason if state == "FAILED" else None,
                "agent_restarts": restarts,
            },
        }
        self._write(json.dumps(event) + "\n")
