"""A job of two nodes with one worker each, whose workers train until they are killed."""

from __future__ import annotations

from core.cases import Limits
from core.launchers import Job, Launcher, free_port
from core.run import Report, Run


def two_nodes(nnodes: str, conf: str = "") -> Job:
    """Two nodes of one worker each, which train until they are killed."""
    return Job("steps.py", workers=1, max_restarts=3, nodes=2, nnodes=nnodes, port=free_port(), conf=conf)


def train(rival: Launcher, run: Run, job: Job, limits: Limits) -> list[Report]:
    """Start both nodes, let them train, and return `newest_workers`.

    The first node starts well before the second, so that it hosts the rendezvous and the store.
    """
    run.ends_by_itself = False
    rival.start(run, job)
    run.settle(limits.settle)
    rival.start(run, job)
    run.wait("step-of-2", job.nodes, limits.start)
    run.settle(limits.settle)
    return newest_workers(run)


def newest_workers(run: Run) -> list[Report]:
    """The first step of the newest worker of each rank, which is alive even if the rival restarted by itself."""
    by_rank = {report.rank: report for report in run.reports if report.event == "step-of-2"}
    return [by_rank[rank] for rank in sorted(by_rank)]
