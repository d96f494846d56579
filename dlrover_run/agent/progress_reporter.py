"""Prints the progress of the job: what the node waits for, the state and result of a health check, the start of each
round, and why there is another one."""

from __future__ import annotations

import os
from collections.abc import Mapping

from dlrover_run import failures
from dlrover_run.agent.worker_round import WorkerRound
from dlrover_run.console.console import Console, DrawTable
from dlrover_run.coordination.model import OVER, Assignment, PlanPhase, RankAssignment, Waiting
from dlrover_run.coordination.rules import CHECK_ALWAYS
from dlrover_run.output.streams import RunDir
from dlrover_run.policies.health.model import HealthStatus, LinkRow, NodeHealth
from dlrover_run.spec import JobSpec

_VERBOSE = frozenset({"INFO", "DEBUG"})
_BAD = frozenset({HealthStatus.STRAGGLER, HealthStatus.FAULT})


def is_verbose(environ: Mapping[str, str]) -> bool:
    """Whether the user wants more than the necessary messages (LOGLEVEL=INFO or DEBUG)."""
    return environ.get("LOGLEVEL", "").upper() in _VERBOSE


_Link = tuple[frozenset[str], LinkRow]


class ProgressReporter:
    """Tells of one node's part in a job, through `console`."""

    def __init__(self, spec: JobSpec, console: Console) -> None:
        self._spec = spec
        self._console = console
        self._waiting: Waiting | None = None
        self._told_restarts = 0
        self._rows: tuple[NodeHealth, ...] = ()
        self._checkup: NodeHealth | None = None
        self._others: frozenset[NodeHealth] = frozenset()
        self._links: frozenset[_Link] = frozenset()
        self._verbose = is_verbose(os.environ)

    def begin(self, run_dir: RunDir) -> None:
        """The launcher starts. Nothing is printed if it leaves no log files, as with torchrun."""
        if run_dir.path is not None and run_dir.keep:
            from dlrover_run.console.rounds import render_start

            self._console.info(render_start(self._spec.workers_per_node, run_dir.path, self._spec.logs))

    def update(self, wanted: Assignment) -> None:
        """Show what the node waits for while it has no place in a round, and for how long still; and once for each node
        check what has come of it. Where that comes between two rounds, what ended the first is said before."""
        self._tell_cause(wanted)
        waiting = wanted.waiting if wanted.ranks is None and wanted.phase not in OVER else None
        if waiting != self._waiting:
            self._waiting = waiting
            if waiting is None:
                self._console.clear_waiting()
            else:
                self._console.show_waiting(waiting.text, waiting.seconds, self._table(waiting.rows))
                self._tell_bad_news(waiting.rows)
        self._tell_outcome(wanted)

    def _tell_cause(self, wanted: Assignment) -> None:
        between = wanted.ranks is None and wanted.phase is PlanPhase.GATHERING
        failure = wanted.failure if between and self._spec.rules.check == CHECK_ALWAYS else None
        if failure is None or wanted.restart_count <= self._told_restarts:
            return
        from dlrover_run.console.rounds import render_check_before_restart

        self._told_restarts = wanted.restart_count
        alone = self._spec.rules.max_nodes == 1
        reason = f"rank {failure.rank} {failure.what}" if alone else str(failure)
        self._console.error(render_check_before_restart(reason, wanted.restart_count))

    def _table(self, rows: tuple[NodeHealth, ...]) -> DrawTable | None:
        if not rows:
            return None
        from dlrover_run.console.health_table import render_live_table

        return lambda columns, lines: render_live_table(rows, columns, lines, self._console.color)

    def _tell_bad_news(self, rows: tuple[NodeHealth, ...]) -> None:
        """Where no table can change, a line for each node that has just been found wanting; those that pass are told
        of when all is over."""
        if not rows:
            return
        known = {(row.node_id, row.incarnation): row.status for row in self._rows}
        self._rows = rows
        if self._console.columns is not None:
            return
        from dlrover_run.console.health_table import render_node_status

        for place, row in enumerate(rows):
            if row.status in _BAD and known.get((row.node_id, row.incarnation)) is not row.status:
                self._console.info(render_node_status(rows, place))

    def _tell_outcome(self, wanted: Assignment) -> None:
        """The table for whoever reads the console of the node with rank 0, one line for the others. A round without
        a check brings nothing new, only fewer nodes or another order of them, and is no reason to speak."""
        checkup, others = wanted.health, wanted.health_table
        if checkup is not None and checkup != self._checkup and checkup.status is not HealthStatus.PENDING:
            self._checkup = checkup
            # Why a node leaves is in its last words; and one line says no more than the table.
            if len(others) <= 1 and not checkup.dismissed:
                from dlrover_run.console.health_table import render_own_status

                self._console.info(render_own_status(checkup))
        if len(others) > 1 and not self._others.issuperset(others):
            from dlrover_run.console.health_table import render_health_table

            self._others = frozenset(others)
            self._console.print(render_health_table(others, *self._paper()), timed=True)
        links = tuple(link for link in wanted.link_table if max(link.one, link.other) < len(others))
        named = frozenset(_named(link, others) for link in links)
        if not self._links.issuperset(named):
            from dlrover_run.console.health_table import render_link_table

            self._links = named
            threshold = self._spec.rules.straggler_threshold
            self._console.print(render_link_table(others, links, threshold, *self._paper()), timed=True)

    def _paper(self) -> tuple[int, bool]:
        """How many columns there are to write on, and whether in colour."""
        return self._console.width, self._console.color

    def begin_round(self, seat: RankAssignment) -> None:
        """A round begins in which this node has that seat. Each node says so in one line. torchrun's block of twelve is
        for scripts that search a log for it: one node of those that meet has it, and all with LOGLEVEL=INFO."""
        if not self._spec.single_node:
            from dlrover_run.console.rounds import render_rank_assignment

            self._console.info(render_rank_assignment(seat))
        meets = self._spec.backend in ("master", "etcd") and not self._spec.console_name
        if self._verbose or (meets and seat.node_rank == 0):
            from dlrover_run.console.rounds import render_rendezvous

            self._console.info(render_rendezvous(seat, self._spec.event_log))

    def end_round(self, ended: WorkerRound, wanted: Assignment, seat: RankAssignment) -> None:
        """A round is over, and `seat` is this node's place in the next one."""
        from dlrover_run.console.rounds import render_membership_change, render_restart

        # A master that has forgotten what was before counts anew.
        if seat.restart_count <= ended.seat.restart_count:
            self._console.error(render_membership_change(wanted.reason, seat, ended.lasted))
            return
        reason, failure = wanted.reason, wanted.failure
        if failure is None or ended.seat.has_rank(failure.rank):
            # All the evidence is here now, and on one node nobody needs to be told which it was.
            root = failures.root_cause(ended.ends)
            reason = f"rank {root.rank} {failures.describe_exit(root)}" if root else reason
        rules = self._spec.rules
        line = render_restart(reason, seat.restart_count, rules.max_restarts, ended.lasted, rules.restart_window)
        self._console.error(line)


def _named(link: LinkRow, others: tuple[NodeHealth, ...]) -> _Link:
    """The same for the same link whatever ranks its ends have by now."""
    ends = frozenset({others[link.one].incarnation, others[link.other].incarnation})
    return ends, LinkRow(0, 0, link.gigabytes, link.problem)
