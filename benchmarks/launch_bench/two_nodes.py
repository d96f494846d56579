"""The case on two nodes, which are two launchers on this machine that meet over the loopback interface.

Every node has one worker. What a rival's rendezvous is told is what torchrun needs, and nothing that would make it
slower.
"""

from __future__ import annotations

from dataclasses import replace

from launch_bench.case import Case, Limits, Measured, until_last
from launch_bench.rivals import OURS_FORKSERVER, OURS_SPAWN, TORCHRUN, Job, Rival, free_port
from launch_bench.room import Room


def pair_start(rival: Rival, room: Room, limits: Limits) -> Measured:
    """Start of the second node, while the first one waits, to the first line on both."""
    job = Job("first_line.py", workers=1, nodes=2, nnodes="2", port=free_port())
    rival.start(room, replace(job, node=0))
    room.settle(limits.settle)
    began = rival.start(room, replace(job, node=1))
    return until_last(began, limits.start, lambda limit: room.wait_reports("first_line", job.nodes, limit))


TWO_NODES = (
    Case(
        name="pair-start",
        title="start of the second of 2 nodes to the first line on both",
        unit="s",
        rivals=(OURS_SPAWN, OURS_FORKSERVER, TORCHRUN),
        baseline=TORCHRUN.name,
        measure=pair_start,
        targets={(OURS_SPAWN.name, ""): 0.5},
    ),
)
