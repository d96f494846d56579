"""How the other nodes react when a node is lost, stopped or cut off, or when its id is used twice. Real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping

import pytest
from links import Links
from support.cluster import NEVER, Cluster, Node, World, leave, places, succeed
from support.harness import WAIT, WORKERS, only_long, still_alive, watched
from support.job import kill_at_once
from support.rendezvous_backends import EVERYWHERE

pytestmark = EVERYWHERE


def worker_on(world: World, node: str) -> int:
    """The process id of a node's only worker."""
    return next(int(member["pid"]) for member in world if member["node"] == node)


def test_the_death_of_a_worker_starts_a_new_round_on_all_nodes(cluster: Cluster) -> None:
    nodes = cluster.nodes("abc", "3", "--max-restarts=1")
    before = cluster.world(3)
    os.kill(before[1]["pid"], signal.SIGKILL)
    after = cluster.world(3)
    assert [m["restart"] for m in after] == [1, 1, 1]
    assert places(after) == places(before)
    assert after[0]["port"] != before[0]["port"]
    assert not {m["pid"] for m in before} & {m["pid"] for m in after}
    succeed(after, *nodes)


@pytest.mark.parametrize("rank", [1, *only_long(0)])
def test_the_other_nodes_continue_without_a_lost_node(cluster: Cluster, rank: int) -> None:
    """torchrun 2.13 trains no further step within 150 s."""
    nodes = {name: cluster.node(name, "1:2") for name in "ab"}
    before = cluster.world(2)
    nodes.pop(before[rank]["node"]).lose()
    after = cluster.world(1)
    assert (after[0]["node"], after[0]["restart"]) == (before[1 - rank]["node"], 0)
    (survivor,) = nodes.values()
    survivor.until_prints("was lost")
    succeed(after, survivor)


def test_the_others_continue_without_the_nodes_of_a_rack(cluster: Cluster) -> None:
    """Two of four nodes lose power at the same moment."""
    nodes = cluster.nodes("abcd", "2:4")
    cluster.world(4)
    a, b, *rack = nodes
    kill_at_once([process for node in rack for process in node.processes])
    for node in rack:
        assert node.finish() == -signal.SIGKILL
        node.expire()
    after: World = []
    # If this machine lets much time pass between the two kills, the nodes are lost one after the other.
    while len(after) < 2:
        after += [message for message in (cluster.mailbox.receive(),) if message["world"] == 2]
    assert {(message["node"], message["restart"]) for message in after} == {("a", 0), ("b", 0)}
    succeed(after, a, b)


@pytest.mark.torchrun
@pytest.mark.parametrize("rank", [1, *only_long(0)])
def test_training_continues_in_a_smaller_world(cluster: Cluster, rank: int) -> None:
    flags = ("1:2", "--start-method=forkserver")
    # The worker that is left fails too, and is charged if the master has not noticed the end of the other node's
    # connection within twice that time. With 0.4 s that happened once, on a busy machine.
    conf = {"lost_after": 2}
    nodes = {name: cluster.node(name, *flags, script=WORKERS / "train.py", conf=conf) for name in "ab"}
    before = cluster.world(2)
    nodes.pop(before[rank]["node"]).lose()
    succeed(cluster.world(1), *nodes.values())


def test_a_killed_agent_ends_its_workers_and_the_other_nodes_continue(cluster: Cluster) -> None:
    """torchrun does not detect it, and the worker trains on alone."""
    nodes = {name: cluster.node(name, "1:2") for name in "ab"}
    before = cluster.world(2)
    with watched(worker_on(before, "b")) as worker:
        nodes["b"].agent.kill()
        assert still_alive(worker, WAIT) == 0
    assert nodes["b"].finish() == 128 + signal.SIGKILL
    nodes["b"].expire()
    after = cluster.world(1)
    assert after[0]["node"] == "a"
    succeed(after, nodes["a"])


@pytest.mark.long
def test_a_node_whose_watchdog_was_killed_reports_that_it_leaves(cluster: Cluster) -> None:
    # It reports it: the timeout that declares a node lost is longer than this test.
    nodes = {name: cluster.node(name, "1:2", conf={"lost_after": NEVER}) for name in "ab"}
    cluster.world(2)
    nodes["b"].signal(signal.SIGKILL)
    assert nodes["b"].finish() == -signal.SIGKILL
    after = cluster.world(1)
    assert after[0]["node"] == "a"
    nodes["a"].until_prints("was ended by SIGKILL")
    succeed(after, nodes["a"])


@pytest.mark.long
def test_a_stopped_agent_is_lost_and_rejoins_as_a_new_node(cluster: Cluster) -> None:
    nodes = {name: cluster.node(name, "1:2", conf=cluster.place.alert) for name in "ab"}
    before = cluster.world(2)
    agent = nodes["b"].agent
    agent.suspend()
    alone = cluster.world(1)
    assert alone[0]["node"] == "a"
    with watched(worker_on(before, "b")) as worker:
        assert still_alive(worker, 0) == 1, "a stopped agent cannot stop its worker"
        agent.resume()
        assert still_alive(worker, WAIT) == 0
    together = cluster.world(2)
    assert places(together) == {"a": 0, "b": 1}
    assert {m["restart"] for m in together} == {0}
    succeed(together, *nodes.values())


def test_a_second_process_with_the_id_of_a_living_node_is_refused_with_the_reason(cluster: Cluster) -> None:
    nodes = [cluster.node(name, "1:2", env={"NODE_ID": f"node-{name}"}) for name in "ab"]
    world = cluster.world(2)
    imitator = cluster.node("x", "1:2", env={"NODE_ID": "node-b"})
    imitator.until_prints(f"{cluster.place.refusal}node id node-b is in use by another process, on ")
    imitator.until_prints(", that is alive")
    leave(imitator)
    assert cluster.mailbox.pending() == []
    succeed(world, *nodes)


@pytest.fixture
def links(cluster: Cluster) -> Iterator[Links]:
    """Links to the meeting place, which can fail."""
    ways = Links(cluster.place.ports)
    yield ways
    ways.close()


def behind_the_links(cluster: Cluster, links: Links, *flags: str, conf: Mapping[str, object]) -> dict[str, Node]:
    """Two nodes, of which b reaches the meeting place through the links."""
    near = cluster.node("a", "1:2", *flags, conf=conf)
    near.until_prints("waiting: ")
    far = cluster.node("b", "1:2", *flags, endpoint=links.ports, conf={**conf, **cluster.place.guest})
    return {"a": near, "b": far}


@pytest.mark.parametrize("silent", ["both ways", *only_long("up", "down")])
def test_a_node_that_a_link_has_cut_off_is_lost_and_rejoins(cluster: Cluster, links: Links, silent: str) -> None:
    nodes = behind_the_links(cluster, links, conf=cluster.place.alert)
    before = cluster.world(2)
    gates = {"up": [links.up], "down": [links.down]}.get(silent, [links.up, links.down])
    for gate in gates:
        gate.clear()
    alone = cluster.world(1)
    assert alone[0]["node"] == "a"
    nodes["b"].until_prints(f"lost {cluster.place.name}")
    with watched(worker_on(before, "b")) as worker:
        assert still_alive(worker, 0) == 1, "a node that is cut off trains on, because it has no new plan"
        for gate in gates:
            gate.set()
        assert still_alive(worker, WAIT) == 0
    succeed(cluster.world(2), *nodes.values())
