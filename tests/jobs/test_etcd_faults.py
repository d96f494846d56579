"""An etcd whose members are killed, hang, lose their data or are unreachable while a job needs it. Real processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from support.cluster import SOON, Cluster, Node, World, places, quiet_port, send_signal, succeed
from support.etcd_server import Etcd, program
from support.harness import WAIT, WORKERS, still_alive, watched
from support.job import CapturedProcess
from support.rendezvous_backends import EtcdBackend

COUNT = WORKERS / "count.py"


@pytest.fixture
def place(etcd_cluster: Etcd) -> EtcdBackend:
    """Three servers that the test may kill or stop."""
    return EtcdBackend(etcd_cluster)


def train(cluster: Cluster, names: str, nnodes: str, *flags: str, **options: object) -> dict[str, Node]:
    """Nodes with torch workers that count their steps. Each node imports torch once for all its rounds."""
    flags = ("--start-method=forkserver", *flags)
    return {name: cluster.node(name, nnodes, *flags, script=COUNT, **options) for name in names}


def next_round(cluster: Cluster, size: int, last: int) -> World:
    """Return the world of the next round, which continues from the last one: it was at step `last` at least."""
    world = cluster.world(size)
    (step,) = {member["step"] for member in world}
    assert step >= last
    return world


SHORT: dict[str, object] = {**SOON, **EtcdBackend.alert}
"""Settings of a job that a test runs for longer than its leases, which are of 6 s."""


def outlive_a_lease(etcd: Etcd, directory: Path) -> None:
    """Wait until a lease longer than those of the nodes (`SHORT`) has expired by etcd's clock."""
    lease = etcd.ctl("lease", "grant", "7").split()[1]
    etcd.ctl("put", "/clock", "runs", f"--lease={lease}")
    places = ",".join(member.endpoint for member in etcd.answering())
    process = subprocess.Popen(
        [program("etcdctl"), "--endpoints", places, "watch", "--rev=1", "/clock"],
        env={"PATH": os.defpath, "ETCDCTL_API": "3"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=directory,
    )
    assert process.stdout is not None
    try:
        CapturedProcess("the watch of a lease", process).until_prints("DELETE\n")
    finally:
        process.kill()
        process.wait(WAIT)
        process.stdout.close()


@pytest.mark.long
@pytest.mark.torchrun
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_each_member_is_lost_in_turn_and_rounds_change_without_it(
    cluster: Cluster, etcd_cluster: Etcd, how: str
) -> None:
    nodes = train(cluster, "abc", "3", "--max-restarts=3")
    world, step = cluster.world(3), 0
    for restart, member in enumerate(etcd_cluster.members):
        assert {m["restart"] for m in world} == {restart}
        member.kill() if how == "killed" else member.stop()
        step = cluster.step_of(world, step)
        send_signal(world[restart : restart + 1], signal.SIGKILL)
        world = next_round(cluster, 3, step)
        etcd_cluster.start() if how == "killed" else member.resume()
    assert {m["restart"] for m in world} == {3}
    cluster.step_of(world, step)
    succeed(world, *nodes.values())


@pytest.mark.long
@pytest.mark.torchrun
@pytest.mark.parametrize("data", ["kept", "lost"])
def test_all_members_are_killed_and_restarted(cluster: Cluster, etcd_cluster: Etcd, tmp_path: Path, data: str) -> None:
    """Without its data etcd knows no job, and the elected agent rebuilds the plan from the reports of the nodes."""
    nodes = train(cluster, "abc", "3:4", conf=SHORT)
    world = cluster.world(3)
    step = cluster.step_of(world, 0)
    etcd_cluster.kill()
    for node in nodes.values():
        node.until_prints("lost etcd at 127.0.0.1:")
        node.until_prints("; running workers do not need it")
    step = cluster.step_of(world, step)
    if data == "lost":
        for folder in (tmp_path / "etcd").glob("*.etcd"):
            shutil.rmtree(folder)
    etcd_cluster.start()
    for node in nodes.values():
        node.until_prints("is back")
    outlive_a_lease(etcd_cluster, cluster.directory)
    assert cluster.mailbox.pending() == []
    step = cluster.step_of(world, step)
    # A new node shows that the round is known.
    nodes["d"] = cluster.node("d", "3:4", script=COUNT, conf=SHORT)
    after = next_round(cluster, 4, step)
    assert places(after) == {**places(world), "d": 3}
    assert {m["restart"] for m in after} == {0}
    succeed(after, *nodes.values())


def test_a_worker_that_dies_while_etcd_is_unavailable_is_reported_later(cluster: Cluster, etcd_cluster: Etcd) -> None:
    nodes = cluster.nodes("abc", "3", "--max-restarts=1")
    world = cluster.world(3)
    etcd_cluster.kill()
    for node in nodes:
        node.until_prints("; running workers do not need it")
    send_signal(world[1:2], signal.SIGKILL)
    with watched(world[0]["pid"], world[2]["pid"]) as others:
        assert still_alive(others, 0) == 2
    assert cluster.mailbox.pending() == []
    etcd_cluster.start()
    after = cluster.world(3)
    assert (after[0]["restart"], places(after)) == (1, places(world))
    succeed(after, *nodes)


def test_a_node_that_finds_no_etcd_waits_and_then_fails(cluster: Cluster) -> None:
    node = cluster.node("a", "2", conf={"join_timeout": 3}, endpoint=[quiet_port(), quiet_port()])
    node.until_prints("waiting: etcd at 127.0.0.1:")
    assert node.finish() == 72
    assert node.has_printed("was not found within 3 s (--rdzv-conf join_timeout): the connection was refused"), (
        node.output
    )
    assert cluster.mailbox.pending() == []
