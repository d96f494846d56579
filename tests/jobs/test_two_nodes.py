"""How nodes find each other, who has which rank, who waits, and how a job of several nodes ends. Real processes."""

from __future__ import annotations

import os
import re
import signal

import pytest
from cluster import NEVER, SOON, Cluster, places, succeed, tell
from harness import WORKERS
from meeting_places import EVERYWHERE

pytestmark = EVERYWHERE


def test_a_job_is_complete_at_once_with_the_most_nodes(cluster: Cluster) -> None:
    nodes = cluster.nodes("ab", "1:2")
    world = cluster.world(2)
    assert sorted(places(world)) == ["a", "b"]
    succeed(world, *nodes)


def test_each_round_is_reported_as_torchrun_reports_it_and_so_is_the_wait_before_it(cluster: Cluster) -> None:
    first = cluster.node("a", "2", "--node-rank=0", "--max-restarts=1")
    first.until_says("waiting: 1 node of 2 is here")
    first.until_says("missing: node 1; at most ")
    second = cluster.node("b", "2", "--node-rank=1", "--max-restarts=1", "--nproc-per-node=2")
    world = cluster.world(3)
    os.kill(world[0]["pid"], signal.SIGKILL)
    again = cluster.world(3)
    for restart, members in enumerate((world, again)):
        first.until_says(f"dlrover-run: round {restart + 1}: rank 0 of 3, as node rank 0 of 2; the store is at ")
        second.until_says(f"dlrover-run: round {restart + 1}: ranks 1 to 2 of 3, as node rank 1 of 2; the store is at ")
        first.until_says("Rendezvous complete for workers. Result:")
        for line in (
            f"restart_count={restart}",
            "master_addr=127.0.0.1",
            f"master_port={members[0]['port']}",
            "group_rank=0",
            "group_world_size=2",
            "local_ranks=",
            "role_ranks=[0]",
            "global_ranks=[0]",
            "role_world_sizes=[3",
            "global_world_sizes=[3",
        ):
            first.until_says(f"\n  {line}")
    succeed(again, first, second)
    assert not second.has_said("Rendezvous complete"), "one node has torchrun's block"
    assert re.search(r"^\d\d:\d\d:\d\d dlrover-run: .*; restart 1 of 1$", second.said, re.MULTILINE), second.said


def test_a_third_node_joins_a_running_pair_and_all_go_on(cluster: Cluster) -> None:
    pair = cluster.nodes("ab", "2:3", conf=SOON)
    before = places(cluster.world(2))
    third = cluster.node("c", "2:3", conf=SOON)
    world = cluster.world(3)
    assert places(world) == {**before, "c": 2}
    # Neither of the two was charged for it, for there are no restarts.
    assert {member["restart"] for member in world} == {0}
    for node in pair:
        node.until_says("joined, so 3 nodes train instead of 2")
    succeed(world, *pair, third)


def test_a_spare_steps_in_with_the_rank_that_is_free(cluster: Cluster) -> None:
    nodes = {name: cluster.node(name, "2", "--spares=1") for name in "ab"}
    before = places(cluster.world(2))
    spare = cluster.node("c", "2", "--spares=1")
    spare.until_says("waiting: 2 nodes train; this one waits to step in")
    nodes.pop("a").lose()
    world = cluster.world(2)
    assert places(world) == {"b": before["b"], "c": before["a"]}
    succeed(world, nodes["b"], spare)


def test_nodes_of_one_machine_are_named_by_node_rank_and_by_what_slurm_calls_them(cluster: Cluster) -> None:
    first, second, third = (
        cluster.node(name, "2:3", f"--node-rank={rank}", "--max-restarts=1", env={"SLURMD_NODENAME": f"gpu0{rank}"})
        for rank, name in enumerate("abc")
    )
    world = cluster.world(3)
    os.kill(next(member["pid"] for member in world if member["node"] == "b"), signal.SIGKILL)
    for node in (first, third):
        node.until_says(", rank 1 on node 1 (gpu01) was killed by SIGKILL")
        node.until_says("; restart 1 of 1")
    cluster.world(3)
    third.lose()
    for node in (first, second):
        node.until_says(", node 2 (gpu02) was lost; ")
        node.until_says("round 3 with 2 nodes")
    succeed(cluster.world(2), first, second)


def test_a_job_that_never_begins_fails_and_says_who_is_missing(cluster: Cluster) -> None:
    nodes = [cluster.node("ab"[rank], "3", f"--node-rank={rank}", conf={"join_timeout": 3}) for rank in range(2)]
    for node in nodes:
        assert node.finish() == 75
        assert node.has_said("the job failed: "), node.said
        assert node.has_said("; missing: node 2")
    assert cluster.mailbox.pending() == []


def test_all_nodes_leave_together_when_the_last_has_succeeded(cluster: Cluster) -> None:
    nodes = {name: cluster.node(name, "2") for name in "ab"}
    world = cluster.world(2)
    tell(world[:1], signal.SIGUSR1)
    third = cluster.node("c", "2")
    # It has been heard, so the master has heard of the success before; nobody is let in any more, nor out.
    third.until_says("2 nodes train")
    assert [node.process.poll() for node in nodes.values()] == [None, None]
    tell(world[1:], signal.SIGUSR1)
    assert [node.finish() for node in (*nodes.values(), third)] == [0, 0, 0]


def test_a_node_that_is_asked_to_go_leaves_when_its_workers_have_ended_and_the_others_go_on(cluster: Cluster) -> None:
    # Nobody is waited for: the others would need this time if they had to find it lost.
    conf = {"lost_after": NEVER}
    nodes = {name: cluster.node(name, "1:2", "--shutdown-timeout=1000", args=["stay"], conf=conf) for name in "ab"}
    world = cluster.world(2)
    goes = next(member for member in world if member["node"] == "b")
    nodes["b"].signal(signal.SIGTERM)
    assert cluster.mailbox.receive() == {**cluster_post(goes), "told": "SIGTERM"}
    assert nodes["b"].process.poll() is None
    assert cluster.mailbox.pending() == []
    os.kill(goes["pid"], signal.SIGKILL)
    assert nodes["b"].finish() == 128 + signal.SIGTERM
    # The worker of the other node is told to make room for the next round, and is as stubborn.
    assert cluster.mailbox.receive()["told"] == "SIGTERM"
    tell([member for member in world if member["node"] == "a"], signal.SIGKILL)
    alone = cluster.world(1)
    assert alone[0]["restart"] == 0
    nodes["a"].until_says("was ended by SIGTERM")
    succeed(alone, nodes["a"])


def cluster_post(member: dict[str, object]) -> dict[str, object]:
    """What every message of a worker has in it."""
    return {key: member[key] for key in ("rank", "restart", "pid")}


def test_when_the_job_fails_each_node_names_the_root_cause_and_one_reports_it_in_full(cluster: Cluster) -> None:
    """torchrun leaves the other node in a barrier for 300 s and has it exit with 0."""
    nodes = {name: cluster.node(name, "3") for name in "abc"}
    failing = cluster.world(3)[1]
    tell([failing], signal.SIGUSR2)
    codes = {name: node.finish() for name, node in nodes.items()}
    assert set(codes.values()) == {1}
    whole = [name for name, node in nodes.items() if "No restarts were allowed" in node.said]
    assert whole == [failing["node"]]
    assert "raise RuntimeError" in nodes[whole[0]].said
    for name, node in nodes.items():
        node.until_says("RuntimeError: the disk under this worker is gone")
        assert "rank 1 " in node.said
        if name not in whole:
            assert node.has_said("; the full report is on the console of node 1 ("), node.said
            assert "Traceback" not in node.said


@pytest.mark.long
@pytest.mark.torchrun
def test_a_worker_that_only_lost_its_peer_is_not_the_root_cause_on_any_node(cluster: Cluster) -> None:
    nodes = cluster.nodes("ab", "2", script=WORKERS / "train.py")
    killed = cluster.world(2)[1]
    os.kill(killed["pid"], signal.SIGKILL)
    codes = [node.finish() for node in nodes]
    assert sorted(codes) == [1, 128 + signal.SIGKILL]
    for node in nodes:
        node.until_says("was killed by SIGKILL")
        assert "rank 1 " in node.said


def test_a_job_that_cannot_start_stops_early_and_says_so(cluster: Cluster) -> None:
    script = cluster.mailbox.script("broken.py", "post()\nraise ImportError('no module named flash_attn')\n")
    nodes = cluster.nodes("ab", "2", "--max-restarts=100", script=script, conf={"early_failure_limit": 3})
    assert [node.finish() for node in nodes] == [1, 1]
    for node in nodes:
        assert node.has_said("3 rounds in succession failed before any worker had got through init_process_group")
    assert max(message["restart"] for message in cluster.mailbox.pending()) == 2
