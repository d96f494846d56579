"""Jobs of torch whose worker is killed or hangs resume from their checkpoint: on one node, and on two that meet over a
master or in etcd, both with TLS."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import Cluster, World, succeed
from support.etcd_server import Tls, serving
from support.harness import WORKERS
from support.rendezvous_backends import EtcdWithCertificates, MasterBackend, RendezvousBackend

from dlrover_run.events.reader import merged, read_logs
from dlrover_run.events.records import WorkerFailed, WorkerStalled
from dlrover_run.failures.causes import Cause

pytestmark = pytest.mark.torchrun

COUNT = WORKERS / "count.py"

STALL_TIMEOUT = 10
"""Seconds: longer than a busy machine keeps all workers of a job from their next step."""


class MasterWithCertificates(MasterBackend):
    """A master that admits only nodes with a certificate."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        files = {"tls_ca": "ca.pem", "tls_cert": "client.pem", "tls_key": "client.key"}
        self.conf = {"auth": "required", **{name: folder / file for name, file in files.items()}}


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RendezvousBackend]:
    """A backend with TLS, if the test names one."""
    if not (name := getattr(request, "param", "")):
        yield MasterBackend()
        return
    folder: Path = request.getfixturevalue("etcd_certificates")
    if name == "master":
        yield MasterWithCertificates(folder)
    else:
        with serving(tmp_path / "etcd", tls=Tls(folder)) as etcd:
            yield EtcdWithCertificates(etcd, folder)


def check_resumed(cluster: Cluster, world: World, restart: int, step: int) -> int:
    """Fail unless this world goes on at that step or at a later one. Return a step that it has trained."""
    assert {member["restart"] for member in world} == {restart}
    (begun,) = {member["step"] for member in world}
    assert begun >= step
    return cluster.step_of(world, begun)


@pytest.mark.parametrize("place", ["master", "etcd"], indirect=True)
def test_two_nodes_resume_after_a_worker_was_killed(cluster: Cluster) -> None:
    nodes = cluster.nodes("ab", "2", "--max-restarts=1", "--start-method=forkserver", script=COUNT)
    world = cluster.world(2)
    step = cluster.step_of(world, 0)
    os.kill(world[1]["pid"], signal.SIGKILL)
    world = cluster.world(2)
    check_resumed(cluster, world, restart=1, step=step)
    succeed(world, *nodes)


def test_one_node_resumes_after_a_worker_was_killed_and_after_one_has_hung(cluster: Cluster, tmp_path: Path) -> None:
    flags = ("--nproc-per-node=2", "--max-restarts=2", "--start-method=forkserver", f"--journal={tmp_path / 'journal'}")
    stalls = ("--stall-action=restart", f"--stall-timeout={STALL_TIMEOUT}")
    node = cluster.node("a", "1", *flags, *stalls, script=COUNT, endpoint=0)
    world = cluster.world(2)
    step = cluster.step_of(world, 0)
    os.kill(world[1]["pid"], signal.SIGKILL)
    world = cluster.world(2)
    step = check_resumed(cluster, world, restart=1, step=step)
    os.kill(world[1]["pid"], signal.SIGALRM)
    world = cluster.world(2)
    check_resumed(cluster, world, restart=2, step=step)
    succeed(world, node)
    events = [entry.event for entry in merged(read_logs(tmp_path / "journal"))]
    failures = [(event.rank, event.cause) for event in events if isinstance(event, WorkerFailed)]
    assert failures == [(1, Cause.SIGNAL), (1, Cause.STALL)]
    (named,) = [event for event in events if isinstance(event, WorkerStalled) and event.guilty]
    place = named.reasons[-1].params
    assert (named.rank, place["file"], place["function"]) == (1, str(COUNT), "hang")
