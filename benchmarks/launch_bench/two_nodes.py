"""The cases on two nodes, which are two launchers on this machine that meet over the loopback interface.

Every node has one worker. What a rival's rendezvous is told is what torchrun needs: nothing is set that would make it
slower, and where a wait before the measurement is shortened, it is for all rivals alike.
"""

from __future__ import annotations

from dataclasses import replace

from launch_bench.case import Case, Limits, Measured, until_last
from launch_bench.rivals import (
    OURS_FORKSERVER,
    OURS_SPAWN,
    TORCHRUN,
    TORCHRUN_UNSHARED,
    Job,
    Rival,
    free_port,
)
from launch_bench.room import Room

PAIR = "step-of-2"
ALONE = "step-of-1"


def _pair(script: str, nnodes: str = "2", max_restarts: int = 0, conf: str = "") -> Job:
    return Job(script, 1, max_restarts, nodes=2, nnodes=nnodes, port=free_port(), conf=conf)


def pair_start(rival: Rival, room: Room, limits: Limits) -> Measured:
    """Start of the second node, while the first one waits, to the first line on both."""
    job = _pair("first_line.py")
    rival.start(room, replace(job, node=0))
    room.settle(limits.settle)
    began = rival.start(room, replace(job, node=1))
    return until_last(began, limits.start, lambda limit: room.wait_reports("first_line", job.nodes, limit))


def pair_worker_death(rival: Rival, room: Room, limits: Limits) -> Measured:
    """SIGKILL of rank 1 to the first step of both ranks after that."""
    room.patient = False
    job = _pair("steps.py", max_restarts=3)
    rival.start(room, job)
    victim = room.wait_each_rank(PAIR, job.nodes, limits.start, after_ns=0)[1]
    room.settle(limits.settle)
    killed = room.kill(victim.pid)
    return until_last(killed, limits.recovery, lambda limit: room.wait_each_rank(PAIR, job.nodes, limit, killed))


def pair_node_death(rival: Rival, room: Room, limits: Limits) -> Measured:
    """SIGKILL of everything on the node that does not host the rendezvous to a step of the other node alone."""
    room.patient = False
    job = _pair("steps.py", nnodes="1:2", max_restarts=3)
    rival.start(room, replace(job, node=0))
    # The first node hosts the rendezvous, for it is there long before the second.
    room.settle(limits.settle)
    rival.start(room, replace(job, node=1))
    room.wait_each_rank(PAIR, job.nodes, limits.start, after_ns=0)
    room.settle(limits.settle)
    killed = room.kill_node(1)
    return until_last(killed, limits.recovery, lambda limit: room.wait_each_rank(ALONE, 1, limit, killed))


def pair_growth(rival: Rival, room: Room, limits: Limits) -> Measured:
    """Start of a second node beside one that trains alone to a step of both together."""
    room.patient = False
    # The first node would wait 30 s for others before it trains alone. The round that is measured has its most nodes
    # and so no last call.
    job = _pair("steps.py", nnodes="1:2", max_restarts=3, conf="last_call_timeout=5")
    rival.start(room, replace(job, node=0))
    room.wait_each_rank(ALONE, 1, limits.start, after_ns=0)
    room.settle(limits.settle)
    began = rival.start(room, replace(job, node=1))
    return until_last(began, limits.recovery, lambda limit: room.wait_each_rank(PAIR, job.nodes, limit, began))


ALL = (OURS_SPAWN, OURS_FORKSERVER, TORCHRUN, TORCHRUN_UNSHARED)

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
    Case(
        name="pair-worker-death",
        title="SIGKILL of a worker on one of 2 nodes to the next step of both",
        unit="s",
        rivals=ALL,
        baseline=TORCHRUN_UNSHARED.name,
        measure=pair_worker_death,
        once=frozenset({TORCHRUN.name}),
        most=5,
    ),
    Case(
        name="pair-node-death",
        title="SIGKILL of one of 2 nodes to a step of the other alone",
        unit="s",
        rivals=ALL,
        baseline=TORCHRUN_UNSHARED.name,
        measure=pair_node_death,
        targets={(OURS_SPAWN.name, ""): 0.1},
        once=frozenset({TORCHRUN.name}),
        warm_up=False,
        most=3,
    ),
    Case(
        name="pair-growth",
        title="start of a second node beside one that trains alone to a step of both",
        unit="s",
        rivals=ALL,
        baseline=TORCHRUN_UNSHARED.name,
        measure=pair_growth,
        once=frozenset({TORCHRUN.name}),
        warm_up=False,
        most=5,
    ),
)
