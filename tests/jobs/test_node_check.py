"""Nodes are checked before they train, each once: real launchers, and check processes that use torch."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from check_nodes import (
    FAULT_LINE,
    STRAGGLER_LINE,
    Act,
    CheckedCluster,
    Visit,
    at,
    check_processes,
    hold,
    kill_once,
    letters,
)
from cluster import SOON, Cluster, places, succeed
from harness import WORKERS, only_long
from meeting_places import EVERYWHERE

from dlrover_run import exit_codes

pytest.importorskip("torch")


@pytest.mark.long
@EVERYWHERE
def test_nodes_that_pass_train_and_are_not_checked_again_for_a_restart(
    checked: CheckedCluster, cluster: Cluster
) -> None:
    nodes = checked.nodes(2, "--max-restarts=1", "--nproc-per-node=2")
    world = cluster.world(4)
    assert places(world) == {"a": 0, "b": 1}
    visits = [(visit.node, visit.local_rank, visit.stage) for visit in checked.gate.of("a", "b")]
    assert sorted(visits) == [(name, rank, stage) for name in "ab" for rank in (0, 1) for stage in ("compute", "link")]
    os.kill(world[0]["pid"], signal.SIGKILL)
    again = cluster.world(4)
    assert {member["restart"] for member in again} == {1}
    assert len(checked.gate.of("a", "b")) == len(visits)
    assert [check_processes(node) for node in nodes] == [[], []]
    succeed(again, *nodes)
    assert nodes[0].said.count("node check of 2 nodes: 2 passed") == 1
    assert nodes[1].said.count("TFLOP/s") == 1


@pytest.mark.long
@pytest.mark.parametrize("count", [3, *only_long(4, 8)])
def test_any_number_of_healthy_nodes_pass(checked: CheckedCluster, cluster: Cluster, count: int) -> None:
    nodes = checked.nodes(count, "--exclude-straggler")
    world = cluster.world(count)
    assert places(world) == {name: rank for rank, name in enumerate(letters(count))}
    # Nothing was left open, so that each has computed once.
    assert sorted(visit.node for visit in checked.gate.of(*letters(count), stage="compute")) == [*letters(count)]
    succeed(world, *nodes)
    nodes[0].until_says(f"node check of {count} nodes: {count} passed")


@pytest.mark.long
def test_nodes_that_have_passed_train_with_torch(checked: CheckedCluster, cluster: Cluster) -> None:
    nodes = checked.nodes(2, script=WORKERS / "train.py")
    succeed(cluster.world(2), *nodes)


@pytest.mark.long
def test_with_always_they_are_checked_again_for_each_round(checked: CheckedCluster, cluster: Cluster) -> None:
    nodes = checked.nodes(2, "--network-check=always", "--max-restarts=1")
    world = cluster.world(2)
    before = len(checked.gate.of("a", "b"))
    os.kill(world[0]["pid"], signal.SIGKILL)
    again = cluster.world(2)
    assert {member["restart"] for member in again} == {1}
    assert len(checked.gate.of("a", "b")) == 2 * before
    succeed(again, *nodes)


@pytest.mark.long
def test_what_came_of_it_is_json_in_the_log_directory_of_each_node(
    checked: CheckedCluster, cluster: Cluster, tmp_path: Path
) -> None:
    checked.gate.rules["c"] = Visit.kill
    nodes = [checked.node(name, "2:3", f"--log-dir={tmp_path / name}", "--redirects=3") for name in "abc"]
    checked.gate.together = 3
    assert nodes.pop().finish() == exit_codes.FAULTY_NODE
    succeed(cluster.world(2), *nodes)
    files = {name: json.loads(next((tmp_path / name).rglob("node_check.json")).read_text()) for name in "abc"}
    found = {name: (content["node"]["node_id"], content["node"]["status"]) for name, content in files.items()}
    assert found == {"a": ("node-a", "passed"), "b": ("node-b", "passed"), "c": ("node-c", "fault")}
    assert files["c"]["node"]["dismissed"] is True
    (device,) = files["a"]["devices"]
    assert device["tflops"] == files["a"]["node"]["tflops"]
    assert files["c"]["devices"] == []
    # Whoever was dismissed may be told of below those who train.
    assert [node["node_id"] for node in files["a"]["nodes"]][:2] == ["node-a", "node-b"]


class TestOneNode:
    """A node that is alone computes, and its workers link with each other."""

    def test_it_passes(self, checked: CheckedCluster, cluster: Cluster) -> None:
        node = checked.node("a", "1", "--standalone", "--nproc-per-node=2", endpoint=0)
        world = cluster.world(2)
        assert sorted(visit.stage for visit in checked.gate.of("a")) == ["compute", "compute", "link", "link"]
        succeed(world, node)
        node.until_says("node check: ")

    @pytest.mark.long
    @pytest.mark.parametrize("stage", ["compute", "link"])
    def test_it_leaves_when_a_check_process_is_killed_each_time(self, checked: CheckedCluster, stage: str) -> None:
        checked.gate.rules["a"] = at(stage, Visit.kill)
        node = checked.node("a", "1", "--standalone", "--nproc-per-node=2", endpoint=0)
        assert node.finish() == exit_codes.FAULTY_NODE
        assert FAULT_LINE in node.said
        assert node.has_said("was killed by SIGKILL")

    def test_it_trains_when_one_was_killed_once(self, checked: CheckedCluster, cluster: Cluster) -> None:
        checked.gate.rules["a"] = kill_once()
        node = checked.node("a", "1", "--standalone", endpoint=0)
        succeed(cluster.world(1), node)

    def test_it_needs_torch_and_says_so(self, cluster: Cluster, tmp_path: Path) -> None:
        (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
        node = cluster.node("a", "1", "--standalone", "--network-check", endpoint=0, env={"PYTHONPATH": str(tmp_path)})
        assert node.finish() == exit_codes.BAD_COMMAND_LINE
        lines = [line for line in node.said.splitlines() if "torch" in line]
        assert len(lines) == 1, node.said
        assert "--network-check needs torch in " in lines[0]


class TestNewcomer:
    """One that comes while others train is checked beside that."""

    @pytest.mark.long
    def test_the_others_train_until_it_has_passed(self, checked: CheckedCluster, cluster: Cluster) -> None:
        checked.gate.rules["c"] = at("compute", hold)
        pair = [checked.node(name, "2:3", conf=SOON) for name in "ab"]
        world = cluster.world(2)
        third = checked.node("c", "2:3", conf=SOON)
        (visit,) = checked.gate.until_at("compute", "c")
        assert [psutil.Process(member["pid"]).is_running() for member in world] == [True, True]
        assert cluster.mailbox.pending() == []
        visit.go()
        succeed(cluster.world(3), *pair, third)
        assert len(checked.gate.of("a", "b")) == 4

    @pytest.mark.parametrize(
        ("act", "code", "line"),
        [
            pytest.param(Visit.kill, exit_codes.FAULTY_NODE, FAULT_LINE, id="killed"),
            pytest.param(Visit.spoil, exit_codes.FAULTY_NODE, FAULT_LINE, id="wrong", marks=pytest.mark.long),
            pytest.param(Visit.slow, exit_codes.STRAGGLER, STRAGGLER_LINE, id="slow", marks=pytest.mark.long),
        ],
    )
    def test_one_that_does_not_pass_leaves_and_the_others_never_stop(
        self, checked: CheckedCluster, cluster: Cluster, act: Act, code: int, line: str
    ) -> None:
        checked.gate.rules["c"] = act
        checked.gate.together = 2
        pair = [checked.node(name, "2:3", "--exclude-straggler", conf=SOON) for name in "ab"]
        world = cluster.world(2)
        third = checked.node("c", "2:3", "--exclude-straggler", conf=SOON)
        assert third.finish() == code
        assert line in third.said
        # Workers of another round would not be these.
        succeed(world, *pair)
        assert cluster.mailbox.pending() == []
