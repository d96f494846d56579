"""Nodes in network namespaces of their own, whose links among each other are cut while the master can be reached."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest
from check_nodes import FAULT_LINE
from cluster import Cluster, Node, Talker

from dlrover_run import exit_codes

pytest.importorskip("torch")

CLONE_NEWNET = 0x40000000

MASTER = "10.77.0.100"


class Namespace:
    """A network namespace that lives for as long as this holds it. Processes that are started inside `entered` are in
    it."""

    def __init__(self) -> None:
        made: list[int] = []

        def make() -> None:
            if ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0:
                made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        if not made:
            pytest.skip("network namespaces cannot be made here")
        (self.fd,) = made

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Have this thread in the namespace."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        _set_namespace(self.fd)
        try:
            yield
        finally:
            _set_namespace(home)
            os.close(home)

    def ip(self, words: str) -> None:
        """Run `ip` in the namespace."""
        with self.entered():
            subprocess.run(["ip", *words.split()], check=True)


class Network:
    """A switch to which nodes and the master are connected. The node with rank N has the address 10.77.0.N+1."""

    def __init__(self, nodes: int) -> None:
        self.switch = Namespace()
        self.switch.ip("link add switch type bridge")
        self.switch.ip("link set switch up")
        self.nodes: list[Namespace] = []
        for _ in range(nodes):
            self.add()
        self.master = self._connect("master", MASTER)

    def add(self) -> Namespace:
        """Connect one more node."""
        number = len(self.nodes)
        self.nodes.append(self._connect(str(number), f"10.77.0.{number + 1}"))
        return self.nodes[-1]

    def cut(self, one: int, other: int) -> None:
        """Lose whatever these two nodes send to each other: it goes to an address that nobody has."""
        for near, far in ((one, other), (other, one)):
            self.nodes[near].ip(f"neigh replace 10.77.0.{far + 1} lladdr 02:00:00:00:00:99 dev eth0 nud permanent")

    def close(self) -> None:
        for namespace in (self.switch, self.master, *self.nodes):
            os.close(namespace.fd)

    def _connect(self, name: str, address: str) -> Namespace:
        namespace = Namespace()
        namespace.ip(f"link add eth0 type veth peer name to-{name}")
        namespace.ip(f"link set to-{name} netns /proc/{os.getpid()}/fd/{self.switch.fd}")
        self.switch.ip(f"link set to-{name} master switch up")
        namespace.ip(f"addr add {address}/24 dev eth0")
        namespace.ip("link set eth0 up")
        namespace.ip("link set lo up")
        return namespace


def _set_namespace(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


@pytest.fixture
def network() -> Iterator[Callable[[int], Network]]:
    with contextlib.ExitStack() as made:

        def make(nodes: int) -> Network:
            there = Network(nodes)
            made.callback(there.close)
            return there

        yield make


class Job:
    """One node in each namespace, and a master in one of its own. The workers print that they train, and end."""

    def __init__(self, cluster: Cluster, network: Network, nnodes: str) -> None:
        self.cluster = cluster
        self.nnodes = nnodes
        with network.master.entered():
            self.master: Talker = cluster.stand_alone_master("--listen", f"{MASTER}:29400")
        self.script = cluster.directory / "train.py"
        self.script.write_text("import os\nprint('trains as one of', os.environ['WORLD_SIZE'], flush=True)\n")
        self.nodes = [self.node(rank, where) for rank, where in enumerate(network.nodes)]

    def node(self, rank: int, where: Namespace) -> Node:
        """Start one node in that namespace."""
        with where.entered():
            return self.cluster.node(
                f"node {rank}",
                self.nnodes,
                f"--rdzv-endpoint={MASTER}:29400",
                "--network-check",
                f"--node-rank={rank}",
                script=self.script,
                conf={"check_timeout": 20},
                # By the name of the host gloo would find loopback.
                env={"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
            )

    def end(self) -> None:
        """End the master, when all nodes have left."""
        self.master.process.terminate()
        assert self.master.finish() == 0


@pytest.mark.parametrize("replaced", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("count", [3, pytest.param(4, marks=pytest.mark.long)])
def test_a_node_that_reaches_the_master_and_no_other_node_leaves(
    cluster: Cluster, network: Callable[[int], Network], count: int, replaced: bool
) -> None:
    """The others train without it, or with another one in its place where they are too few."""
    there = network(count)
    for other in range(count):
        if other != 1:
            there.cut(1, other)
    job = Job(cluster, there, str(count) if replaced else f"{count - 1}:{count}")
    broken = job.nodes.pop(1)
    assert broken.finish() == exit_codes.FAULTY_NODE, cluster.told()
    assert FAULT_LINE in broken.said
    job.master.until_says("Fault nodes are: [1] and stragglers are: [")
    if replaced:
        job.nodes.append(job.node(1, there.add()))
    for node in job.nodes:
        assert node.finish() == 0, cluster.told()
        node.until_says(f"trains as one of {len(job.nodes)}")
    job.end()


def test_of_two_nodes_that_do_not_reach_each_other_nobody_is_blamed(
    cluster: Cluster, network: Callable[[int], Network]
) -> None:
    there = network(2)
    there.cut(0, 1)
    job = Job(cluster, there, "1:2")
    assert [node.finish() for node in job.nodes] == [0, 0], cluster.told()
    job.master.until_says("Fault nodes are: [] and stragglers are: [")
    job.master.until_says("it cannot be told whose fault that is")
    job.end()


def test_a_link_between_two_good_nodes_is_named_and_nobody_leaves(
    cluster: Cluster, network: Callable[[int], Network]
) -> None:
    there = network(4)
    there.cut(0, 1)
    job = Job(cluster, there, "3:4")
    assert [node.finish() for node in job.nodes] == [0] * 4, cluster.told()
    job.master.until_says("Fault nodes are: [] and stragglers are: [")
    job.master.until_says("warning: the link between node 0 on ")
    job.master.until_says("does not work")
    job.end()
