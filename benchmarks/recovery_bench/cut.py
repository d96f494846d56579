"""A network is cut without a word: each node has a network of its own, and the cable of one is pulled at the switch."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace

from launch_bench.case import Limits, Measured
from launch_bench.rivals import OURS_FORKSERVER, OURS_SPAWN, TORCHRUN_UNSHARED, Rival
from launch_bench.room import Room

from dlrover_run.coordination.rules import KEEP_ALIVE_ATTEMPTS, KEEP_ALIVE_INTERVAL
from dlrover_run.local_cluster import network
from recovery_bench.deaths import newest, pair
from recovery_bench.fault import Fault
from recovery_bench.recovery import step, time_recovery

KEEP_ALIVE = "the keep-alive time-out"
KEEP_ALIVE_TIMEOUT = KEEP_ALIVE_INTERVAL * KEEP_ALIVE_ATTEMPTS

MOST = 3.0
"""Keep-alive time-outs in which the others have to train again."""

CONF = f"keep_alive_interval={KEEP_ALIVE_INTERVAL:g},keep_alive_max_attempt={KEEP_ALIVE_ATTEMPTS}"
"""Told to all rivals, for torchrun's own is 15 s. torchrun takes whole seconds."""

MEETING_PORT = 29400
"""Any port will do: nobody else is in these networks."""


def network_cut(rival: Rival, room: Room, limits: Limits) -> Measured:
    """The second of two nodes is cut off, to a step of the first alone."""
    room.patient = False
    # torch and gloo take the address of the machine's name unless they are told another.
    room.environment["GLOO_SOCKET_IFNAME"] = "eth0"
    with contextlib.closing(network.Network()) as switch:
        job = replace(pair("1:2"), address=network.node_address(0), port=MEETING_PORT)
        for node in (0, 1):
            conf = f"{CONF},is_host={int(node == 0)}"
            with switch.connect(node).entered():
                rival.start(room, replace(job, node=node, own_address=network.node_address(node), conf=conf))
            room.settle(limits.settle)
        room.wait_each_rank(step(2), job.nodes, limits.start, after_ns=0)
        room.settle(limits.settle)
        gone = room.of_node(1)
        spared = [worker.pid for worker in newest(room) if worker.pid not in gone]
        room.watch(spared)
        cut = time.monotonic_ns()
        switch.switch.ip("link set node-1 down")
        return time_recovery(room, cut, 1, spared, limits.recovery)


CUT = Fault(
    name="network-cut",
    title="the network of one of 2 nodes cut without a word, to a step of the other alone",
    unit="s",
    rivals=(OURS_SPAWN, OURS_FORKSERVER, TORCHRUN_UNSHARED),
    baseline=KEEP_ALIVE,
    measure=network_cut,
    targets={(OURS_SPAWN.name, ""): MOST, (OURS_FORKSERVER.name, ""): MOST},
    yardstick=KEEP_ALIVE_TIMEOUT,
    most=2,
    few={TORCHRUN_UNSHARED.name: 1},
    absent=network.why_not,
)
