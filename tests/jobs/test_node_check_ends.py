"""A launch that ends while its node is checked leaves nothing behind, and the others go on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from check_nodes import CheckedCluster, at, hold
from cluster import Cluster, Node, succeed, watched_processes
from harness import WAIT, only_long, still_alive

pytest.importorskip("torch")


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
def test_a_launcher_that_is_killed_leaves_no_check_process(
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
def test_a_node_that_goes_in_the_middle_of_a_check_is_no_news_of_the_others(
    checked: CheckedCluster, cluster: Cluster, stage: str
) -> None:
    checked.gate.rules["b"] = at(stage, hold)
    nodes = checked.nodes(3, "--exclude-straggler", conf={"check_timeout": 30})
    checked.gate.until_at(stage, "b")
    nodes.pop(1).lose()
    checked.gate.rules.pop("b")
    nodes.append(checked.node("x", "3", "--exclude-straggler", rank=1))
    succeed(cluster.world(3), *nodes)
