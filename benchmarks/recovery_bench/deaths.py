"""The faults of two nodes on the loopback interface: a worker, a node or the master dies, or a node comes."""

from __future__ import annotations

import time
from dataclasses import replace

from comparison.lost import Lost
from launch_bench.case import Limits, Measured
from launch_bench.processes import of_run
from launch_bench.rivals import OURS_FORKSERVER, OURS_SPAWN, TORCHRUN, TORCHRUN_UNSHARED, Job, Rival, free_port
from launch_bench.room import Report, Room

from dlrover_run.process_tree.tree import MASTER_NAME
from recovery_bench.fault import Fault
from recovery_bench.recovery import step, time_recovery
from recovery_bench.rivals import ELASTIC, EVERYONE
from recovery_bench.steps import longest_pause, read_steps

CALM = 10.0
"""Seconds after the death of a master in which training must not stop. It is started again in the first of them."""

PAUSE_BEFORE = ", the same before it"
WORKER_BEFORE = ", a worker killed before it"
WORKER_AFTER = ", a worker killed after it"

AS_EVER = 1.5
"""Up to where a recovery counts as the same as the one before it: single ones of one launcher differ by as much."""


def pair(nnodes: str, conf: str = "") -> Job:
    """Two nodes of one worker each, which train until they are ended."""
    return Job("steps.py", workers=1, max_restarts=3, nodes=2, nnodes=nnodes, port=free_port(), conf=conf)


def begin(rival: Rival, room: Room, job: Job, limits: Limits) -> list[Report]:
    """Start both nodes and wait until they train; what the workers reported of their first step, by rank.

    The first node is there well before the second, so that it is the one that hosts the rendezvous and the store.
    """
    room.patient = False
    rival.start(room, replace(job, node=0))
    room.settle(limits.settle)
    rival.start(room, replace(job, node=1))
    room.wait_each_rank(step(2), job.nodes, limits.start, after_ns=0)
    room.settle(limits.settle)
    return newest(room)


def newest(room: Room) -> list[Report]:
    """What the workers of the newest world of two reported of its first step, by rank.

    A rival may have restarted of itself; the newest worker of each rank is the one that is alive.
    """
    by_rank = {report.rank: report for report in room.reports if report.event == step(2)}
    return [by_rank[rank] for rank in sorted(by_rank)]


def kill_worker(room: Room, workers: list[Report], limits: Limits) -> Measured:
    """SIGKILL of rank 1, to the first step of both ranks after that."""
    spared = workers[0].pid
    room.watch([spared])
    killed = room.kill(workers[1].pid)
    return time_recovery(room, killed, 2, [spared], limits.recovery)


def worker_death(rival: Rival, room: Room, limits: Limits) -> Measured:
    """A worker is killed; its node and its launcher are well."""
    workers = begin(rival, room, pair("2"), limits)
    return kill_worker(room, workers, limits)


def node_death(rival: Rival, room: Room, limits: Limits) -> Measured:
    """Everything on the node is killed at once that hosts neither the rendezvous nor the store; the other goes on."""
    workers = begin(rival, room, pair("1:2"), limits)
    lost = room.of_node(1)
    spared = [worker.pid for worker in workers if worker.pid not in lost]
    room.watch(spared)
    killed = room.kill_node(1)
    return time_recovery(room, killed, 1, spared, limits.recovery)


def growth(rival: Rival, room: Room, limits: Limits) -> Measured:
    """A second node is started beside one that trains alone."""
    room.patient = False
    # The first node would wait 30 s for others before it trains alone. The round that is measured has its most nodes
    # and so no last call.
    job = pair("1:2", conf="last_call_timeout=5")
    rival.start(room, replace(job, node=0))
    alone = room.wait_each_rank(step(1), 1, limits.start, after_ns=0)[0]
    room.settle(limits.settle)
    room.watch([alone.pid])
    began = rival.start(room, replace(job, node=1))
    return time_recovery(room, began, job.nodes, [alone.pid], limits.recovery)


def find_master(room: Room) -> int | None:
    """The process that the nodes meet at, where a launcher has one of its own for that."""
    processes = of_run([launcher.pid for launcher in room.launchers], str(room.directory))
    return next((process.pid for process in processes if process.command == MASTER_NAME), None)


def master_death(rival: Rival, room: Room, limits: Limits) -> Measured:
    """Where the nodes meet dies: the longest pause between two steps then, and a worker killed before and after.

    With torchrun the first node's launcher is that place, so that node dies.
    """
    workers = begin(rival, room, pair("2"), limits)
    if find_master(room) is None:
        room.kill_node(0)
        room.settle(CALM)
        raise Lost("the other node goes on without a step")
    before = kill_worker(room, workers, limits)
    if before.unended:
        raise Lost("the worker that was killed before it did not come back")
    room.settle(limits.settle)
    calm = time.monotonic_ns()
    room.settle(limits.settle)
    workers = newest(room)
    room.watch(worker.pid for worker in workers)
    # A launcher may have had another one since.
    master = find_master(room)
    if master is None:
        raise Lost("the master had ended of itself")
    killed = room.kill(master)
    room.settle(CALM)
    over = time.monotonic_ns()
    if any(worker.pid in room.ends for worker in workers):
        raise Lost("training stopped with the master")
    steps = read_steps(room.directory)
    after = kill_worker(room, workers, limits)
    values = {
        "": longest_pause(steps, killed, over),
        PAUSE_BEFORE: longest_pause(steps, calm, killed),
        WORKER_BEFORE: before.values[""],
        WORKER_AFTER: after.values[""],
    }
    return Measured(values, after.note, frozenset({WORKER_AFTER} if after.unended else ()))


DEATHS = (
    Fault(
        name="worker-death",
        title="one of 2 workers killed, on 2 nodes, to the next step of both",
        unit="s",
        rivals=EVERYONE,
        baseline=TORCHRUN_UNSHARED.name,
        measure=worker_death,
        targets={(OURS_SPAWN.name, ""): 1.0, (OURS_FORKSERVER.name, ""): 0.25},
        few={TORCHRUN.name: 3},
    ),
    Fault(
        name="node-death",
        title="launcher and worker of one of 2 nodes killed at once, to a step of the other alone",
        unit="s",
        rivals=ELASTIC,
        baseline=TORCHRUN_UNSHARED.name,
        measure=node_death,
        targets={(OURS_SPAWN.name, ""): 0.1, (OURS_FORKSERVER.name, ""): 0.1},
        most=3,
        few={TORCHRUN.name: 1, TORCHRUN_UNSHARED.name: 2},
    ),
    Fault(
        name="growth",
        title="a second node started beside one that trains alone, to a step of both",
        unit="s",
        rivals=ELASTIC,
        baseline=TORCHRUN_UNSHARED.name,
        measure=growth,
        targets={(OURS_SPAWN.name, ""): 0.5, (OURS_FORKSERVER.name, ""): 0.25},
        most=3,
        few={TORCHRUN.name: 1},
    ),
    Fault(
        name="master-death",
        title="the master killed, the longest pause between two steps",
        unit="s",
        rivals=ELASTIC,
        baseline="",
        measure=master_death,
        targets={(OURS_SPAWN.name, WORKER_AFTER): AS_EVER, (OURS_FORKSERVER.name, WORKER_AFTER): AS_EVER},
        within={"": PAUSE_BEFORE, WORKER_AFTER: WORKER_BEFORE},
        most=2,
        few={TORCHRUN.name: 1, TORCHRUN_UNSHARED.name: 1},
    ),
)
