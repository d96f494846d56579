"""`benchmarks/check_decide.py`: a check of more nodes takes as much more work, and no more than that."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from harness import calls_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import check_decide


def calls(nodes: int, world: str) -> int:
    """How many functions are called for one check."""

    def check() -> None:
        assert check_decide.check(nodes, world, limit=1e6).done

    return calls_of(check)


@pytest.mark.parametrize("world", check_decide.WORLDS)
def test_four_times_the_nodes_are_about_four_times_the_work(world: str) -> None:
    assert calls(240, world) < 6 * calls(60, world)


def test_it_writes_its_results(tmp_path: Path) -> None:
    assert check_decide.main(["--nodes", "12", "--output", str(tmp_path)]) == 0
    runs = json.loads((tmp_path / "decide.json").read_text())["runs"]
    assert {run["world"]: run["named"] for run in runs} == dict(zip(check_decide.WORLDS, (0, 4, 4, 4), strict=True))
    assert (tmp_path / "decide.md").read_text().count("| 12 |") == len(check_decide.WORLDS)
