"""Nodes in their own network namespaces, whose links to each other are cut while they can reach the master."""

from __future__ import annotations

import pytest
from support.check_nodes import FAULT_LINE
from support.cluster import Cluster, Node
from support.job import CapturedProcess

from dlrover_run import exit_codes
from dlrover_run.features.local_nodes.network import Namespace, Network

pytest.importorskip("torch")


class Job:
    """One node in each namespace, and a master on the switch. The workers print that they train, and end."""

    def __init__(self, cluster: Cluster, network: Network, namespaces: list[Namespace], nnodes: str) -> None:
        self.cluster = cluster
        self.nnodes = nnodes
        self.endpoint = f"{network.master_address}:29400"
        with network.switch.entered():
            self.master: CapturedProcess = cluster.stand_alone_master("--listen", self.endpoint)
        self.script = cluster.directory / "train.py"
        self.script.write_text("import os\nprint('trains as one of', os.environ['WORLD_SIZE'], flush=True)\n")
        self.nodes = [self.node(rank, where) for rank, where in enumerate(namespaces)]

    def node(self, rank: int, where: Namespace) -> Node:
        """Start one node in that namespace."""
        with where.entered():
            return self.cluster.node(
                f"node {rank}",
                self.nnodes,
                f"--rdzv-endpoint={self.endpoint}",
                "--network-check",
                f"--node-rank={rank}",
                script=self.script,
                conf={"check_timeout": 20},
                # For the name of the host gloo would resolve a loopback address.
                env={"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
            )

    def end(self) -> None:
        """End the master after all nodes have left."""
        self.master.process.terminate()
        assert self.master.finish() == 0


@pytest.mark.long
@pytest.mark.parametrize("replaced", [True, False])
@pytest.mark.parametrize("count", [3, 4])
def test_a_node_that_reaches_the_master_and_no_other_node_leaves(
    cluster: Cluster, network: Network, count: int, replaced: bool
) -> None:
    """The others train without it, or with a replacement where they are too few."""
    namespaces = [network.connect(number) for number in range(count)]
    for other in range(count):
        if other != 1:
            network.cut(1, other)
    job = Job(cluster, network, namespaces, str(count) if replaced else f"{count - 1}:{count}")
    broken = job.nodes.pop(1)
    assert broken.finish() == exit_codes.FAULTY_NODE, cluster.outputs()
    assert FAULT_LINE in broken.output
    job.master.until_prints("Fault nodes are: [1] and stragglers are: [")
    if replaced:
        job.nodes.append(job.node(1, network.connect(count)))
    for node in job.nodes:
        assert node.finish() == 0, cluster.outputs()
        node.until_prints(f"trains as one of {len(job.nodes)}")
    job.end()


def test_of_two_nodes_that_cannot_reach_each_other_neither_is_faulty(cluster: Cluster, network: Network) -> None:
    namespaces = [network.connect(number) for number in range(2)]
    network.cut(0, 1)
    job = Job(cluster, network, namespaces, "1:2")
    assert [node.finish() for node in job.nodes] == [0, 0], cluster.outputs()
    job.master.until_prints("Fault nodes are: [] and stragglers are: [")
    job.master.until_prints("which of them is at fault cannot be decided")
    job.end()
