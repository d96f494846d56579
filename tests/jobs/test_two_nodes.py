"""How nodes rendezvous, how they get ranks, which nodes wait, and how a job of several nodes ends. Real processes."""

from __future__ import annotations

import os
import re
import signal

import pytest
from support.cluster import MEMBER, NEVER, SOON, Cluster, places, send_signal, succeed
from support.harness import WORKERS
from support.rendezvous_backends import EVERYWHERE

pytestmark = EVERYWHERE


def test_a_round_starts_at_once_with_the_maximum_number_of_nodes(cluster: Cluster) -> None:
    nodes = cluster.nodes("ab", "1:2")
    world = cluster.world(2)
    assert sorted(places(world)) == ["a", "b"]
    succeed(world, *nodes)


def test_each_round_and_the_wait_before_it_are_reported_as_torchrun_reports_them(cluster: Cluster) -> None:
    first = cluster.node("a", "2", "--node-rank=0", "--max-restarts=1")
    first.until_prints("waiting: 1 node of 2 is here")
    first.until_prints("missing: node 1; at most ")
    second = cluster.node("b", "2", "--node-rank=1", "--max-restarts=1", "--nproc-per-node=2")
    world = cluster.world(3)
    os.kill(world[0]["pid"], signal.SIGKILL)
    again = cluster.world(3)
    for restart, members in enumerate((world, again)):
        first.until_prints(f"dlrover-run: round {restart + 1}: rank 0 of 3, as node rank 0 of 2; the store is at ")
        if restart:
            continue
        second.until_prints("dlrover-run: round 1: ranks 1 to 2 of 3, as node rank 1 of 2; the store is at ")
        first.until_prints("Rendezvous complete for workers. Result:")
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
            first.until_prints(f"\n  {line}")
    succeed(again, first, second)
    assert first.output.count("Rendezvous complete") == 1, "one node prints torchrun's block, in the first round"
    assert not second.has_printed("Rendezvous complete")
    # The lines of a restart are printed by the node whose worker failed, and by that with rank 0: here it is one node.
    assert re.search(r"^\d\d:\d\d:\d\d dlrover-run: .*; restart 1 of 1$", first.output, re.MULTILINE), first.output
    assert not second.has_printed("restart 1 of 1")
    assert not second.has_printed("round 2: "), "its ranks are the same"


def test_a_third_node_joins_a_running_pair_and_all_continue(cluster: Cluster) -> None:
    pair = cluster.nodes("ab", "2:3", conf=SOON)
    before = places(cluster.world(2))
    third = cluster.node("c", "2:3", conf=SOON)
    world = cluster.world(3)
    assert places(world) == {**before, "c": 2}
    # It consumed no restart: the job has none.
    assert {member["restart"] for member in world} == {0}
    # The node with rank 0 prints it for all.
    next(node for name, node in zip("ab", pair, strict=True) if before[name] == 0).until_prints(
        "joined, so 3 nodes train instead of 2"
    )
    succeed(world, *pair, third)


def test_a_newcomer_interrupts_no_round_before_it_has_imported_what_its_workers_need(cluster: Cluster) -> None:
    gate, site = cluster.directory / "gate", cluster.directory / "lib" / "site-packages"
    site.mkdir(parents=True)
    (site / "slow.py").write_text("import os, time\nwhile os.path.exists(os.environ['GATE']):\n    time.sleep(0.05)\n")
    script = cluster.directory / "script.py"
    script.write_text(f"import slow\n{MEMBER.read_text()}")
    fork = {"script": script, "conf": SOON}
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (site, WORKERS)))}
    no_gate = {**paths, "GATE": str(cluster.directory / "no-gate")}
    pair = cluster.nodes("ab", "2:3", "--start-method=forkserver", env=no_gate, **fork)
    before = cluster.world(2)
    gate.touch()
    third = cluster.node("c", "2:3", "--start-method=forkserver", env={**paths, "GATE": str(gate)}, **fork)
    third.until_prints("2 nodes train; 1 node imports what its workers need, and then takes part")
    assert cluster.mailbox.pending() == [], "no round has begun"
    gate.unlink()
    world = cluster.world(3)
    assert places(world) == {**places(before), "c": 2}
    succeed(world, *pair, third)


def test_a_spare_takes_the_free_rank(cluster: Cluster) -> None:
    nodes = {name: cluster.node(name, "2", "--spares=1") for name in "ab"}
    before = places(cluster.world(2))
    spare = cluster.node("c", "2", "--spares=1")
    spare.until_prints("waiting: 2 nodes train; this one waits to step in")
    nodes.pop("a").lose()
    world = cluster.world(2)
    assert places(world) == {"b": before["b"], "c": before["a"]}
    succeed(world, nodes["b"], spare)


def test_a_node_that_was_not_asked_for_says_so_and_that_it_has_run_nothing(cluster: Cluster) -> None:
    nodes = cluster.nodes("ab", "2")
    world = cluster.world(2)
    third = cluster.node("c", "2")
    third.until_prints("waiting: 2 nodes train, and this node was not asked for (--spares is 0, ")
    succeed(world, *nodes, third)
    assert "warning: this launcher has run no worker: " in third.output, third.output
    assert "has run no worker" not in nodes[0].output + nodes[1].output


def test_nodes_of_one_machine_are_named_by_their_node_rank_and_slurm_node_name(cluster: Cluster) -> None:
    first, second, third = (
        cluster.node(name, "2:3", f"--node-rank={rank}", "--max-restarts=1", env={"SLURMD_NODENAME": f"gpu0{rank}"})
        for rank, name in enumerate("abc")
    )
    world = cluster.world(3)
    os.kill(next(member["pid"] for member in world if member["node"] == "b"), signal.SIGKILL)
    first.until_prints(", rank 1 on node 1 (gpu01) was killed by SIGKILL")
    second.until_prints("rank 1 was killed by SIGKILL")
    for node in (first, second):
        node.until_prints("; restart 1 of 1")
    cluster.world(3)
    assert not third.has_printed("restart 1 of 1"), "of 64 nodes at most two print it"
    third.lose()
    first.until_prints(", node 2 (gpu02) was lost; ")
    first.until_prints("round 3 with 2 nodes")
    succeed(cluster.world(2), first, second)


def test_a_job_that_never_starts_fails_and_names_the_missing_nodes(cluster: Cluster) -> None:
    nodes = [cluster.node("ab"[rank], "3", f"--node-rank={rank}", conf={"join_timeout": 3}) for rank in range(2)]
    for node in nodes:
        assert node.finish() == 75
        assert node.has_printed("the job failed: "), node.output
        assert node.has_printed("; missing: node 2")
    assert cluster.mailbox.pending() == []


def test_all_nodes_leave_together_when_the_last_worker_has_succeeded(cluster: Cluster) -> None:
    nodes = {name: cluster.node(name, "2") for name in "ab"}
    world = cluster.world(2)
    send_signal(world[:1], signal.SIGUSR1)
    third = cluster.node("c", "2")
    # The master has received its report, and so the success before it; no node joins or leaves now.
    third.until_prints("2 nodes train")
    assert [node.process.poll() for node in nodes.values()] == [None, None]
    send_signal(world[1:], signal.SIGUSR1)
    assert [node.finish() for node in (*nodes.values(), third)] == [0, 0, 0]


def test_a_terminated_node_leaves_when_its_workers_have_ended_and_the_others_continue(cluster: Cluster) -> None:
    # The others do not wait: if they had to detect the loss, they would need this time.
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
    # The worker of the other node is stopped for the next round, and also ignores the signal.
    assert cluster.mailbox.receive()["told"] == "SIGTERM"
    send_signal([member for member in world if member["node"] == "a"], signal.SIGKILL)
    alone = cluster.world(1)
    assert alone[0]["restart"] == 0
    nodes["a"].until_prints("was ended by SIGTERM")
    succeed(alone, nodes["a"])


def cluster_post(member: dict[str, object]) -> dict[str, object]:
    """The common fields of every message of a worker."""
    return {key: member[key] for key in ("rank", "restart", "pid")}


def test_when_the_job_fails_each_node_names_the_root_cause_and_one_prints_the_full_report(cluster: Cluster) -> None:
    """torchrun keeps the other node in a barrier for 300 s, and its exit code is 0."""
    nodes = {name: cluster.node(name, "3") for name in "abc"}
    failing = cluster.world(3)[1]
    send_signal([failing], signal.SIGUSR2)
    codes = {name: node.finish() for name, node in nodes.items()}
    assert set(codes.values()) == {1}
    whole = [name for name, node in nodes.items() if "No restarts were allowed" in node.output]
    assert whole == [failing["node"]]
    assert "raise RuntimeError" in nodes[whole[0]].output
    for name, node in nodes.items():
        node.until_prints("RuntimeError: the disk under this worker is gone")
        assert "rank 1 " in node.output
        if name not in whole:
            assert node.has_printed("; the full report is on the console of node 1 ("), node.output
            assert "Traceback" not in node.output


@pytest.mark.long
@pytest.mark.torchrun
def test_a_worker_that_only_lost_its_peer_is_not_the_root_cause_on_any_node(cluster: Cluster) -> None:
    nodes = cluster.nodes("ab", "2", script=WORKERS / "train.py")
    killed = cluster.world(2)[1]
    os.kill(killed["pid"], signal.SIGKILL)
    codes = [node.finish() for node in nodes]
    assert sorted(codes) == [1, 128 + signal.SIGKILL]
    for node in nodes:
        node.until_prints("was killed by SIGKILL")
        assert "rank 1 " in node.output


def test_a_job_that_cannot_start_ends_early_with_the_reason(cluster: Cluster) -> None:
    script = cluster.mailbox.script("broken.py", "post()\nraise ImportError('no module named flash_attn')\n")
    nodes = cluster.nodes("ab", "2", "--max-restarts=100", script=script, conf={"early_failure_limit": 3})
    assert [node.finish() for node in nodes] == [1, 1]
    for node in nodes:
        assert node.has_printed("3 rounds in succession failed before any worker had got through init_process_group")
    assert max(message["restart"] for message in cluster.mailbox.pending()) == 2
