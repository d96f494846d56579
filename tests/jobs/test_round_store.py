"""The store of a round, which the agent of rank 0 serves as torchrun's does."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support.cluster import Cluster, Node, succeed
from support.harness import OURS, WAIT, WORKERS, Mailbox, agent_of, finish, launch, only_long, run, still_alive, watched
from support.rendezvous_backends import EVERYWHERE, MasterBackend
from support.scripted_agent import rank_assignment
from support.virtual_loop import run_virtually

from dlrover_run.coordination.records.round import RoundKey
from dlrover_run.processes.ports import HeldPort
from dlrover_run.workers.round_store import OTHER_NODES_TIMEOUT, RoundStores
from dlrover_run.workers.store_process import StoreProcess

CLIENTS = str(WORKERS / "store_clients.py")


@pytest.mark.torchrun
@pytest.mark.parametrize(
    "flags",
    [
        ["--standalone", "--nproc-per-node=3"],
        *only_long(
            ["--nproc-per-node=3"],
            ["--standalone", "--nproc-per-node=3", "--start-method=forkserver"],
            ["--local-nodes=3", "--nproc-per-node=1"],
            ["--nproc-per-node=3", "--nnodes=1", "--master-port=0"],
        ),
    ],
    ids=" ".join,
)
def test_scripts_that_are_only_clients_meet_and_the_store_outlives_rank_0(flags: list[str], tmp_path: Path) -> None:
    job = run(OURS, [*flags, CLIENTS], cwd=tmp_path)
    assert job.code == 0, job.err


def stores(job: subprocess.Popen[str]) -> list[psutil.Process]:
    return [one for one in agent_of(job).children() if one.name() == "dlrover-store"]


@contextmanager
def job_of(mailbox: Mailbox, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A job of clients, which is ended in any case."""
    job = launch(mailbox, *flags, WORKERS / "store_client.py")
    try:
        yield job
    finally:
        job.terminate()
        finish(job)


def test_each_round_has_a_fresh_store_which_ends_with_it(mailbox: Mailbox) -> None:
    with job_of(mailbox, "--nproc-per-node=2", "--max-restarts=1") as job:
        first = mailbox.gather(2)
        [before] = stores(job)
        with watched(before.pid) as pidfds:
            os.kill(first[1]["pid"], signal.SIGKILL)
            second = mailbox.gather(2)
            assert still_alive(pidfds, WAIT) == 0
        assert second[0]["port"] != first[0]["port"]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(first[0]["port"])))
        [after] = stores(job)
        # It is small, and has no torch.
        assert after.memory_info().rss < 30 << 20


def test_with_a_port_that_is_given_the_next_store_listens_there_again(mailbox: Mailbox) -> None:
    held = HeldPort()
    port = str(held.number)
    held.release()
    with job_of(mailbox, "--nproc-per-node=2", "--max-restarts=1", f"--master-port={port}") as job:
        first = mailbox.gather(2)
        before = stores(job)
        os.kill(first[1]["pid"], signal.SIGKILL)
        second = mailbox.gather(2)
        assert {one["port"] for one in (*first, *second)} == {port}
        assert stores(job) != before


def test_the_store_ends_with_its_agent(mailbox: Mailbox) -> None:
    with job_of(mailbox, "--nproc-per-node=1") as job:
        mailbox.gather(1)
        with watched(*(one.pid for one in stores(job))) as pidfds:
            assert len(pidfds) == 1
            agent_of(job).kill()
            assert still_alive(pidfds, WAIT) == 0


def test_a_job_whose_script_uses_no_store_has_no_process_for_it(mailbox: Mailbox) -> None:
    job = launch(mailbox, "--nproc-per-node=1", WORKERS / "hold.py")
    try:
        mailbox.gather(1)
        assert stores(job) == []
    finally:
        job.terminate()
        finish(job)


def test_a_store_that_is_killed_is_named_and_the_next_round_has_another_one(mailbox: Mailbox) -> None:
    with job_of(mailbox, "--nproc-per-node=1", "--max-restarts=1") as job:
        [worker] = mailbox.gather(1)
        [store] = stores(job)
        with watched(store.pid) as pidfds:
            store.kill()
            assert still_alive(pidfds, WAIT) == 0
        os.kill(worker["pid"], signal.SIGKILL)
        mailbox.gather(1)
        job.terminate()
        _, err = job.communicate(timeout=WAIT)
        assert "the store of round 1 was killed by SIGKILL: workers that still need it fail" in err


@pytest.mark.torchrun
def test_a_job_may_have_rank_0_host_the_store(mailbox: Mailbox) -> None:
    """The port is held for it."""
    script = WORKERS / "initialise.py"
    job = launch(mailbox, "--nproc-per-node=2", script, env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    try:
        assert len(mailbox.gather(2)) == 2
        assert stores(job) == []
    finally:
        job.terminate()
        finish(job)


CLIENT = WORKERS / "store_client.py"

RANKS = rank_assignment(key=RoundKey(), nodes=3, world_size=3, role_world_size=3, store_port=1)


@EVERYWHERE
def test_the_node_of_rank_0_serves_the_store_for_all_nodes(cluster: Cluster) -> None:
    nodes = cluster.nodes("ab", "2", script=CLIENT)
    world = cluster.world(2)
    assert len({(one["address"], one["port"]) for one in world}) == 1
    first = next(number for number, name in enumerate("ab") if name == world[0]["node"])
    assert len(stores(nodes[first].process)) == 1
    assert stores(nodes[1 - first].process) == []
    # The node of rank 0 has nothing else to do for the job, and serves the store until the last worker has ended.
    os.kill(world[0]["pid"], signal.SIGUSR1)
    with watched(world[0]["pid"]) as pidfds:
        assert still_alive(pidfds, WAIT) == 0
    succeed(world[1:], *nodes)


@EVERYWHERE
@pytest.mark.long
def test_each_round_of_several_nodes_has_a_fresh_store(cluster: Cluster) -> None:
    nodes = cluster.nodes("ab", "2", "--max-restarts=1", script=CLIENT)
    first = cluster.world(2)
    [before] = [store for node in nodes for store in stores(node.process)]
    with watched(before.pid) as pidfds:
        os.kill(first[1]["pid"], signal.SIGKILL)
        second = cluster.world(2)
        assert still_alive(pidfds, WAIT) == 0
    assert second[0]["port"] != first[0]["port"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((first[0]["address"], int(first[0]["port"])))
    os.kill(second[0]["pid"], signal.SIGUSR1)
    succeed(second[1:], *nodes)


def test_local_nodes_have_one_store(mailbox: Mailbox) -> None:
    job = launch(mailbox, "--local-nodes=3", CLIENT)
    try:
        world = mailbox.gather(3)
        assert len({(one["address"], one["port"]) for one in world}) == 1
        mains = [one for one in psutil.Process(job.pid).children(recursive=True) if one.name() == "dlrover-store"]
        assert len(mains) == 1
        for one in world:
            os.kill(one["pid"], signal.SIGUSR1)
    finally:
        code = finish(job).code
    assert code == 0


class StaticBackend(MasterBackend):
    """No rendezvous: flags give the ranks, and the nodes do not communicate."""

    conf: Mapping[str, object] = {}

    def flags(self, ports: Sequence[int]) -> list[str]:
        (port,) = ports
        return ["--master-addr=127.0.0.1", f"--master-port={port}"]


@pytest.fixture
def static(mailbox: Mailbox) -> Iterator[Cluster]:
    cluster = Cluster(mailbox, StaticBackend())
    yield cluster
    cluster.close()


def static_pair(static: Cluster, *flags: str) -> tuple[Node, Node]:
    first, second = (
        static.node(name, "2", f"--node-rank={rank}", *flags, script=CLIENT) for rank, name in enumerate("ab")
    )
    return first, second


def test_static_nodes_have_the_store_until_the_workers_of_all_nodes_have_ended(static: Cluster) -> None:
    nodes = static_pair(static)
    world = static.world(2)
    os.kill(world[0]["pid"], signal.SIGUSR1)
    nodes[0].until_prints("the workers of this node have succeeded; it serves the store for node 1 for 300 s at most")
    assert len(stores(nodes[0].process)) == 1
    # It uses the store once more.
    succeed(world[1:], *nodes)


def test_the_store_of_static_nodes_does_not_outlive_the_last_worker_that_fails(static: Cluster) -> None:
    first, second = static_pair(static)
    world = static.world(2)
    os.kill(world[0]["pid"], signal.SIGUSR1)
    first.until_prints("it serves the store for node 1")
    os.kill(world[1]["pid"], signal.SIGKILL)
    assert second.finish() != 0
    assert first.finish() == 0


def test_a_static_node_whose_workers_ended_first_is_not_waited_for(static: Cluster) -> None:
    first, second = static_pair(static)
    world = static.world(2)
    os.kill(world[1]["pid"], signal.SIGUSR1)
    assert second.finish() == 0
    os.kill(world[0]["pid"], signal.SIGUSR1)
    assert first.finish() == 0
    assert not first.has_printed("serves the store"), first.output


def test_a_static_node_that_serves_the_store_ends_with_the_first_signal(static: Cluster) -> None:
    first, second = static_pair(static)
    world = static.world(2)
    os.kill(world[0]["pid"], signal.SIGUSR1)
    first.until_prints("it serves the store for node 1")
    with watched(*(one.pid for one in stores(first.process))) as pidfds:
        first.signal(signal.SIGTERM)
        first.finish()
        assert still_alive(pidfds, WAIT) == 0
    os.kill(world[1]["pid"], signal.SIGKILL)
    assert second.finish() != 0


def test_a_static_node_that_never_reports_its_end_is_waited_for_300_s() -> None:
    lines: list[str] = []

    class Store(StoreProcess):
        """A store that runs, and was used."""

        def __init__(self) -> None:
            self.used = True

        @property
        def pids(self) -> set[int]:
            return {1}

    async def end() -> float:
        stores = RoundStores({}, lines.append, lambda key, address: None)
        stores._last = Store()
        loop = asyncio.get_running_loop()
        began = loop.time()
        await stores.end_static(RANKS, succeeded=True)
        return loop.time() - began

    assert run_virtually(end()) == OTHER_NODES_TIMEOUT
    assert lines[1:] == ["warning: within 300 s 2 nodes did not report the end of workers: the store ends"]
