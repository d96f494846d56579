"""Prints the progress of the job: what the node waits for, the state and result of a health check, the start of each
round, and why there is another one. With `--event-log-handler=console`, writes torchrun's events as well."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping

from dlrover_run.agent.host import host_name
from dlrover_run.agent.worker_round import WorkerRound
from dlrover_run.console import health_table, rounds
from dlrover_run.console.console import Console, DrawTable
from dlrover_run.coordination.model import OVER, Assignment, PlanPhase, RankAssignment, Waiting
from dlrover_run.failures import causes
from dlrover_run.output.streams import RunDir
from dlrover_run.policies.health.model import HealthAssignment, HealthProgress, HealthStatus, LinkRow, NodeHealth
from dlrover_run.policies.health.rules import CHECK_ALWAYS, HealthRules
from dlrover_run.spec import JobSpec

_BAD = frozenset({HealthStatus.STRAGGLER, HealthStatus.FAULT})


def is_verbose(environ: Mapping[str, str]) -> bool:
    """Whether the user wants more than the necessary messages (LOGLEVEL=INFO or DEBUG)."""
    return environ.get("LOGLEVEL", "").upper() in ("INFO", "DEBUG")


class ProgressReporter:
    """Prints the progress of one node on `console`."""

    def __init__(self, spec: JobSpec, console: Console) -> None:
        self._spec = spec
        self._health_rules = HealthRules.get(spec.rules.policy)
        self._console = console
        self._waiting: Waiting | None = None
        self._reported_restarts = 0
        self._rows: tuple[NodeHealth, ...] = ()
        self._node_health: NodeHealth | None = None
        self._others: frozenset[NodeHealth] = frozenset()
        self._links: frozenset[tuple[frozenset[str], LinkRow]] = frozenset()
        self._verbose = is_verbose(os.environ)

    def begin(self, run_dir: RunDir) -> None:
        """Print at the start where the logs are; nothing if no log file is kept, as with torchrun."""
        if run_dir.path is not None and run_dir.keep:
            self._console.info(rounds.render_start(self._spec.workers_per_node, run_dir.path, self._spec.logs))

    def update(self, assignment: Assignment) -> None:
        """Show what a node without ranks waits for, with the time left, and the result of each health check once. If
        the check runs between two rounds, the failure that ended the first round is printed before it."""
        self._print_cause(assignment)
        waiting = assignment.waiting if assignment.ranks is None and assignment.phase not in OVER else None
        if waiting != self._waiting:
            self._waiting = waiting
            if waiting is None:
                self._console.clear_waiting()
            else:
                rows = HealthProgress.get(waiting.policy).rows
                self._console.show_waiting(waiting.text, waiting.seconds, self._table(rows))
                self._print_bad_nodes(rows)
        self._print_outcome(assignment)

    def _print_cause(self, assignment: Assignment) -> None:
        between = assignment.ranks is None and assignment.phase is PlanPhase.GATHERING
        failure = assignment.failure if between and self._health_rules.check == CHECK_ALWAYS else None
        if failure is None or assignment.restart_count <= self._reported_restarts:
            return
        self._reported_restarts = assignment.restart_count
        alone = self._spec.rules.max_nodes == 1
        reason = f"rank {failure.rank} {failure.exit_text}" if alone else str(failure)
        self._console.error(rounds.render_check_before_restart(reason, assignment.restart_count))

    def _table(self, rows: tuple[NodeHealth, ...]) -> DrawTable | None:
        if not rows:
            return None
        return lambda columns, lines: health_table.render_live_table(rows, columns, lines, self._console.color)

    def _print_bad_nodes(self, rows: tuple[NodeHealth, ...]) -> None:
        """On a console without a live table, print a line for each node that has just failed. Nodes that pass are
        printed at the end of the check."""
        if not rows:
            return
        known = {(row.node_id, row.incarnation): row.status for row in self._rows}
        self._rows = rows
        if self._console.columns is not None:
            return
        for place, row in enumerate(rows):
            if row.status in _BAD and known.get((row.node_id, row.incarnation)) is not row.status:
                self._console.info(health_table.render_node_status(rows, place))

    def _print_outcome(self, assignment: Assignment) -> None:
        """Print the table on the node with rank 0, and one line on the others. A round without a check only has fewer
        nodes or another order of them, which prints nothing."""
        part = HealthAssignment.get(assignment.policy)
        node_health, others = part.health, part.health_table
        page = self._console.width, self._console.color
        if (
            node_health is not None
            and node_health != self._node_health
            and node_health.status is not HealthStatus.PENDING
        ):
            self._node_health = node_health
            # The line would repeat the table, and the result of the job has the reason of a dismissal.
            if len(others) <= 1 and not node_health.dismissed:
                self._console.info(health_table.render_own_status(node_health))
        if len(others) > 1 and not self._others.issuperset(others):
            self._others = frozenset(others)
            self._console.print(health_table.render_health_table(others, *page), timed=True)
        links = tuple(link for link in part.link_table if max(link.one, link.other) < len(others))
        named = frozenset(_named(link, others) for link in links)
        if not self._links.issuperset(named):
            self._links = named
            threshold = self._health_rules.straggler_threshold
            self._console.print(health_table.render_link_table(others, links, threshold, *page), timed=True)

    def begin_round(self, ranks: RankAssignment) -> None:
        """Print that a round begins: one line on each node. Scripts search logs for torchrun's block of twelve lines,
        which the node with rank 0 prints; with LOGLEVEL=INFO all nodes do."""
        if not self._spec.single_node:
            self._console.info(rounds.render_rank_assignment(ranks))
        has_peers = self._spec.backend in ("master", "etcd")
        if self._verbose or (has_peers and ranks.node_rank == 0):
            self._console.info(rounds.render_rendezvous(ranks, self._spec.event_log))

    def end_round(self, ended: WorkerRound, assignment: Assignment, ranks: RankAssignment) -> None:
        """Print why a round has ended; `ranks` are this node's in the next one."""
        # A master without a journal counts restarts from 0.
        if ranks.restart_count <= ended.ranks.restart_count:
            self._console.error(rounds.render_membership_change(assignment.reason, ranks, ended.lasted))
            return
        reason, failure = assignment.reason, assignment.failure
        if failure is None or ended.ranks.has_rank(failure.rank):
            # All exits of this node are known by now, and the name of the only node is left out.
            root = causes.root_cause(ended.ends)
            reason = f"rank {root.rank} {causes.describe_exit(root)}" if root else reason
        rules = self._spec.rules
        line = rounds.render_restart(
            reason, ranks.restart_count, rules.max_restarts, ended.lasted, rules.restart_window
        )
        self._console.error(line)


def _named(link: LinkRow, others: tuple[NodeHealth, ...]) -> tuple[frozenset[str], LinkRow]:
    """The identity of a link, which does not depend on the present ranks of its ends."""
    ends = frozenset({others[link.one].incarnation, others[link.other].incarnation})
    return ends, LinkRow(0, 0, link.gigabytes, link.problem)


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
                "rdzv_backend": self._spec.backend,
                "raw_error": reason if state == "FAILED" else None,
                "agent_restarts": restarts,
            },
        }
        self._write(json.dumps(event) + "\n")
