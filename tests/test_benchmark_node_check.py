"""`benchmarks/node_check.py`: the model of the published rule does what was seen of it; the manual has the table."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import node_check
from check_world import Computing, NodeTruth, World, whole
from node_check_bench.published import named
from node_check_bench.rates import CPU_SHARE, RULES, Rate, table

ROOT = Path(__file__).resolve().parents[1]
SLOW_NETWORK = NodeTruth(drag=4.5)
CRASHES = NodeTruth(computing=Computing.FAILS)


def blamed(world: World, seed: int = 0) -> set[int]:
    return named(world, random.Random(seed), CPU_SHARE)


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_the_published_rule_finds_no_slow_node_among_so_few(nodes: int) -> None:
    world = World((SLOW_NETWORK, *whole(nodes - 1).nodes), noise=0.0)
    assert blamed(world) == set()


def test_the_published_rule_finds_one_among_eight() -> None:
    assert blamed(World((SLOW_NETWORK, *whole(7).nodes), noise=0.0)) == {0}


@pytest.mark.parametrize("nodes", [2, 3])
def test_of_so_few_nodes_all_exit_because_of_one(nodes: int) -> None:
    assert blamed(World((CRASHES, *whole(nodes - 1).nodes))) == set(range(nodes))


def test_of_four_nodes_the_broken_one_is_found_by_its_second_partner() -> None:
    assert blamed(World((CRASHES, *whole(3).nodes))) == {0}


def test_a_table_says_none_and_all_only_where_they_are_exact() -> None:
    rates = [
        Rate(2, "bad link", rule, cases=1000, planted=0, hits=0, untold=0, healthy=2000, blamed=1, cases_with_blame=at)
        for at, rule in enumerate(RULES)
    ]
    assert table(rates)[2:] == ["| 2 | bad link | - | - | - | 0 % | 0.1 % | 0.2 % |"]


def test_it_writes_its_results(tmp_path: Path) -> None:
    assert node_check.main(["--cases", "2", "--nodes", "3", "--output", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "rates.json").read_text())
    assert {rate["rule"] for rate in written["rates"]} == set(RULES)
    assert "| 3 | computes slowly |" in (tmp_path / "rates.md").read_text()


def test_the_manual_has_the_ranges_of_the_results() -> None:
    """Of each kind of fault, over all sizes."""
    results = (ROOT / "benchmarks/results/node-check/rates.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in results if re.match(r"\| +\d", line)]
    manual = (ROOT / "docs/node-check.md").read_text().splitlines()
    kinds = dict.fromkeys(row[1] for row in cells)
    assert len(kinds) == 10
    for kind in kinds:
        columns = zip(*(row[2:] for row in cells if row[1] == kind), strict=True)
        assert "| " + " | ".join([kind, *map(range_of, columns)]) + " |" in manual


def range_of(rates: Sequence[str]) -> str:
    shares = [float(rate.removesuffix(" %")) for rate in rates if rate != "-"]
    if not shares:
        return "-"
    low, high = f"{min(shares):.0f}", f"{max(shares):.0f}"
    return f"{low} %" if low == high else f"{low} to {high} %"
