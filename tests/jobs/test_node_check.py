"""Each node is checked once before it trains: real launchers, and check processes that use torch.

A launcher that ends during the check leaves no process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.check_nodes import (
    FAULT_LINE,
    STRAGGLER_LINE,
    Act,
    CheckedCluster,
    Visit,
    at,
    check_processes,
    hold,
    kill_once,
)
from support.cluster import SOON, Cluster, Node, places, succeed
from support.harness import WAIT, only_long, still_alive
from support.job import watched_processes
from support.rendezvous_backends import EVERYWHERE

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
    assert nodes[0].output.count("node check of 2 nodes: 2 passed") == 1
    assert nodes[1].output.count("TFLOP/s") == 1


class TestOneNode:
    """A single node computes, and its workers link with each other."""

    def test_it_passes(self, checked: CheckedCluster, cluster: Cluster) -> None:
        node = checked.node("a", "1", "--standalone", "--nproc-per-node=2", endpoint=0)
        world = cluster.world(2)
        assert sorted(visit.stage for visit in checked.gate.of("a")) == ["compute", "compute", "link", "link"]
        succeed(world, node)
        node.until_prints("node check: ")

    def test_it_trains_when_a_check_process_was_killed_once(self, checked: CheckedCluster, cluster: Cluster) -> None:
        checked.gate.rules["a"] = kill_once()
        node = checked.node("a", "1", "--standalone", endpoint=0)
        succeed(cluster.world(1), node)

    def test_it_needs_torch_and_reports_it(self, cluster: Cluster, tmp_path: Path) -> None:
        (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
        node = cluster.node("a", "1", "--standalone", "--network-check", endpoint=0, env={"PYTHONPATH": str(tmp_path)})
        assert node.finish() == exit_codes.BAD_COMMAND_LINE
        lines = [line for line in node.output.splitlines() if "torch" in line]
        assert len(lines) == 1, node.output
        assert "--network-check needs torch in " in lines[0]


class TestNewcomer:
    """A node that joins while others train is checked during the training."""

    @pytest.mark.parametrize(
        ("act", "code", "line"),
        [
            pytest.param(Visit.kill, exit_codes.FAULTY_NODE, FAULT_LINE, id="killed"),
            pytest.param(Visit.spoil, exit_codes.FAULTY_NODE, FAULT_LINE, id="wrong", marks=pytest.mark.long),
            pytest.param(Visit.slow, exit_codes.STRAGGLER, STRAGGLER_LINE, id="slow", marks=pytest.mark.long),
        ],
    )
    def test_a_node_that_fails_the_check_leaves_and_the_others_never_stop(
        self, checked: CheckedCluster, cluster: Cluster, act: Act, code: int, line: str
    ) -> None:
        checked.gate.rules["c"] = act
        checked.gate.together = 2
        pair = [checked.node(name, "2:3", "--exclude-straggler", conf=SOON) for name in "ab"]
        world = cluster.world(2)
        third = checked.node("c", "2:3", "--exclude-straggler", conf=SOON)
        assert third.finish() == code
        assert line in third.output
        # In another round there would be other workers.
        succeed(world, *pair)
        assert cluster.mailbox.pending() == []


def watchdog(node: Node) -> psutil.Process:
    return psutil.Process(node.pid)


def agent(node: Node) -> psutil.Process:
    return node.agent


@pytest.mark.parametrize("stage", ["link", *only_long("compute")])
@pytest.mark.parametrize("number", [signal.SIGTERM, *only_long(signal.SIGINT)])
def test_a_signal_ends_a_node_that_is_being_checked(
    checked: CheckedCluster, number: signal.Signals, stage: str, tmp_path: Path
) -> None:
    checked.gate.rules["a"] = at(stage, hold)
    node = checked.node("a", "1", "--standalone", "--nproc-per-node=2", endpoint=0)
    checked.gate.until_at(stage, "a")
    with watched_processes(node.processes) as pidfds:
        node.signal(number)
        assert node.finish() == 128 + number
        assert still_alive(pidfds, WAIT) == 0
    assert [path.name for path in tmp_path.iterdir() if path.name != "gate-site"] == []


@pytest.mark.parametrize("victim", [watchdog, agent])
@pytest.mark.parametrize("stage", ["link", *only_long("compute")])
def test_a_killed_launcher_leaves_no_check_process(
    checked: CheckedCluster, victim: Callable[[Node], psutil.Process], stage: str, tmp_path: Path
) -> None:
    checked.gate.rules["a"] = at(stage, hold)
    node = checked.node("a", "1", "--standalone", "--nproc-per-node=2", endpoint=0)
    checked.gate.until_at(stage, "a")
    with watched_processes(node.processes) as pidfds:
        victim(node).kill()
        assert node.finish() != 0
        assert still_alive(pidfds, WAIT) == 0
    assert [path.name for path in tmp_path.iterdir() if path.name != "gate-site"] == []


@pytest.mark.long
@pytest.mark.parametrize("stage", ["compute", "link"])
def test_a_node_that_leaves_during_a_check_gives_no_result_for_the_others(
    checked: CheckedCluster, cluster: Cluster, stage: str
) -> None:
    checked.gate.rules["b"] = at(stage, hold)
    nodes = checked.nodes(3, "--exclude-straggler", conf={"check_timeout": 30})
    checked.gate.until_at(stage, "b")
    nodes.pop(1).lose()
    checked.gate.rules.pop("b")
    nodes.append(checked.node("x", "3", "--exclude-straggler", rank=1))
    succeed(cluster.world(3), *nodes)
