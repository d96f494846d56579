"""A node that fails its check or is slow leaves; another node replaces it, and no healthy node leaves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.check_nodes import (
    FAULT_LINE,
    CheckedCluster,
    Visit,
    at,
    letters,
)
from support.cluster import Cluster, Node, places, succeed
from support.rendezvous_backends import EVERYWHERE

from dlrover_run import exit_codes

pytest.importorskip("torch")

SHORT = {"check_timeout": 30}
"""For links that one peer never joins: the other one waits for a fifth of that."""


def leaves(node: Node, code: int, line: str) -> None:
    """Check that a node leaves because of its check."""
    assert node.finish() == code, node.output
    assert line in node.output


def is_replaced(checked: CheckedCluster, cluster: Cluster, others: list[Node], name: str) -> None:
    """Start a node in place of the one with rank 1. Check that all train with it and were checked once."""
    count = len(others) + 1
    checked.gate.rules.pop("b")
    others.append(checked.node(name, str(count), "--exclude-straggler", rank=1))
    world = cluster.world(count)
    assert places(world) == {**{n: r for r, n in enumerate(letters(count)) if r != 1}, name: 1}
    succeed(world, *others)
    healthy = [visit.node for visit in checked.gate.of(*letters(count).replace("b", ""), stage="compute")]
    assert sorted(healthy) == sorted(letters(count).replace("b", ""))


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "stage", "name"),
    [(2, "compute", "b"), (2, "link", "x"), (3, "link", "b"), (4, "compute", "b"), (8, "compute", "x")],
)
def test_a_node_whose_check_process_is_killed_each_time_leaves_and_is_replaced(
    checked: CheckedCluster, cluster: Cluster, stage: str, count: int, name: str
) -> None:
    checked.gate.rules["b"] = at(stage, Visit.kill)
    nodes = checked.nodes(count, "--exclude-straggler", conf=SHORT)
    leaves(nodes.pop(1), exit_codes.FAULTY_NODE, FAULT_LINE)
    is_replaced(checked, cluster, nodes, name)


@pytest.mark.long
@EVERYWHERE
def test_the_console_of_a_node_has_the_lines_that_users_grep_for(checked: CheckedCluster, cluster: Cluster) -> None:
    checked.gate.rules["b"] = Visit.kill
    nodes = [checked.node(name, "2:3") for name in "abc"]
    leaves(nodes.pop(1), exit_codes.FAULTY_NODE, FAULT_LINE)
    succeed(cluster.world(2), *nodes)
    outputs = cluster.outputs()
    # No node has linked with the faulty one, so its neighbours have only one number each.
    assert re.search(
        r"^\d\d:\d\d:\d\d dlrover-run: Round 0: The node elapsed time are \{0: \d+\.\d+, 2: \d+\.\d+\}$", outputs, re.M
    )
    assert outputs.count("dlrover-run: Round 0: The node status are {0: True, 1: False, 2: True}.\n") == 1
    assert outputs.count("dlrover-run: Fault nodes are: [1] and stragglers are: [].\n") == 1


@pytest.mark.long
def test_a_node_that_computes_wrong_results_leaves_at_once(checked: CheckedCluster, cluster: Cluster) -> None:
    checked.gate.rules["b"] = Visit.spoil
    nodes = checked.nodes(3, "--exclude-straggler")
    broken = nodes.pop(1)
    leaves(broken, exit_codes.FAULTY_NODE, FAULT_LINE)
    assert broken.has_printed("rows of a product are wrong")
    assert len(checked.gate.of("b", stage="compute")) == 1
    is_replaced(checked, cluster, nodes, "x")


@pytest.mark.long
@pytest.mark.parametrize("misses", ["once", "twice"])
def test_another_process_looks_again_for_a_missing_device(
    checked: CheckedCluster, cluster: Cluster, tmp_path: Path, misses: str
) -> None:
    missing = tmp_path / "missing"
    missing.write_text("1" if misses == "once" else "12")
    checked.gate.together = 3
    device, lacks_it = {"CHECK_DEVICE": "abacus"}, {"CHECK_DEVICE_MISSING": str(missing)}
    nodes = [checked.node(name, "2:3", env={**device, **(lacks_it if name == "b" else {})}) for name in "abc"]
    if misses == "twice":
        leaves(nodes.pop(1), exit_codes.FAULTY_NODE, FAULT_LINE)
    succeed(cluster.world(len(nodes)), *nodes)
    visits = checked.gate.of("b", stage="compute")
    assert len({visit.pid for visit in visits}) == len(visits) == 2
    is_named = "computes on the CPU where the others have abacus" in cluster.outputs()
    assert is_named is (misses == "twice")
