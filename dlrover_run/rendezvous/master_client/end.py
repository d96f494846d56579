"""The end of the master that a node has started. If no other node needs the master, its launcher waits for that end and
collects it: the first process of a container may collect nothing, and would keep one defunct process for each job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.plan import OVER, PlanPhase
from dlrover_run.coordination.records.round import RankAssignment
from dlrover_run.processes import tree

END_TIMEOUT = 3.0
"""Seconds that a launcher waits at its end for the end of its master. That takes 0.1 s, unless other nodes leave later
or the master still shows a failed job (`features.operate.web.scrapes`)."""


def is_last_node(assignment: Assignment, ranks: RankAssignment | None) -> bool:
    """Whether no other node needs the master after this one, as far as this node knows: the job is over, or the node
    was alone in its round. `ranks` are its last ones, None while it waits. Pure."""
    if assignment.phase in OVER:
        return True
    return assignment.phase is not PlanPhase.TRAINING if ranks is None else ranks.nodes == 1


def collect_masters(pids: Iterable[int], timeout: float | None = None) -> None:
    """Wait until these masters, children of this process, have ended, and collect them. It blocks for `timeout` seconds
    at most, None for END_TIMEOUT; masters that run longer are left alone. The client of the node must be closed before:
    a master serves its nodes."""
    masters = list(pids)
    tree.wait_for_ends(masters, END_TIMEOUT if timeout is None else timeout)
    for pid in masters:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
