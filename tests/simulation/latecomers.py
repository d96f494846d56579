"""The invariant for the name of a job: whatever ended, a job of the same name that comes later begins in a bounded
time.

Its nodes come after all others have ended, as launchers of one node: one starts a master if there is none, which exits
by itself, and each gives up when it has been refused for too long; then the user starts another one.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from dlrover_run.coordination.records.report import NodePhase
from dlrover_run.coordination.records.rules import RESULT_RETENTION, JobRules
from dlrover_run.rendezvous.reconnect import BACKOFF_MAX
from dlrover_run.spec import JobSpec
from simulation.backends import WrittenNode
from simulation.disk import Disk
from simulation.invariants import Invariants
from simulation.master_client import ClientOfMaster
from simulation.masters import JOB, Masters
from simulation.network import Weather
from simulation.nodes import Node, NodeClient, Place, job_spec
from simulation.timeline import Timeline, demand
from tf_ps_runner.cluster.reports import NodeTasks

MARGIN = 2.0
"""Seconds for the messages between a node and its master, and for the turns of their loops."""


def demand_free_name(timeline: Timeline, rules: JobRules, invariants: Invariants, disk: Disk, random: Random) -> None:
    """Demand that a later job of the same name begins within the time for which a result is kept. In some runs its
    masters are killed now and then."""
    contents = disk.stories.get(JOB)
    before = None if contents is None or contents.plan is None else contents.plan.key
    masters = Masters(timeline, invariants, disk, two_places=False, clock_jumps=False, launched=True)
    nodes: list[WrittenNode] = []

    def open_client(node: Node, spec: JobSpec, on_change: Callable[[], None]) -> NodeClient:
        return ClientOfMaster(node, spec, on_change, masters)

    place = Place(timeline, open_client, invariants, Weather(0.01, 0.0), lambda node, address: True)

    def start() -> None:
        number = len(nodes) + 1
        spec = job_spec(f"late{number}", f"10.2.0.{number}", 1, "default", None, rules)
        nodes.append(WrittenNode(place, spec, f"late{number}", f"l{number}", None))
        # A node of the kind of the job, which a coordinator of another kind refuses.
        nodes[-1].part = NodeTasks() if rules.engine else None
        nodes[-1].report(phase=NodePhase.WAITING)

    def kill() -> None:
        if masters.current.alive:
            masters.current.kill()

    def has_begun() -> bool:
        job = masters.current.job if masters.current.alive else None
        return job is not None and not job.over and job.connected > 0

    start()
    if random.random() < 0.5:
        for _ in range(3):
            timeline.after(random.uniform(0.0, RESULT_RETENTION), kill)
    bound = timeline.now + RESULT_RETENTION + BACKOFF_MAX + MARGIN
    try:
        while not has_begun():
            timeline.run_until(bound, lambda: has_begun() or nodes[-1].rendezvous.problem is not None)
            if nodes[-1].rendezvous.problem is None:
                break
            start()
        demand(has_begun(), f"a later job of the same name begins, after the round {before}")
    finally:
        for process in (*nodes, *masters.all):
            process.dispose()
