"""The record of what the suite found: the dates of each row are in order, its layer is counted, its test exists."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from support.harness import WAIT

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "tests" / "FOUND.md").read_text()


class Row(NamedTuple):
    """One defect: what a user saw, when it came in and was mended, what found it, and the test that repeats it."""

    defect: str
    came: str
    mended: str
    layer: str
    test: str


def table(heading: str) -> list[list[str]]:
    """Return the cells of the rows of the table under a heading, without its first two lines."""
    text = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


ROWS = [Row(*cells) for cells in table("The record")]


def test_each_row_was_mended_after_it_came_in() -> None:
    assert len(ROWS) >= 40
    for row in ROWS:
        for cell in (row.came, row.mended):
            assert re.fullmatch(r"\d{4}-\d\d-\d\d `[0-9a-f]{8}`", cell), row
        assert row.came[:10] <= row.mended[:10], row
    assert len({row.defect for row in ROWS}) == len(ROWS)


def test_the_layers_are_counted() -> None:
    counted = {cells[0]: int(cells[1]) for cells in table("What finds what")}
    assert counted == Counter(row.layer for row in ROWS)


def test_each_test_exists() -> None:
    named = [f"tests/{row.test.strip('`')}" for row in ROWS]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *dict.fromkeys(named)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    collected = done.stdout.splitlines()
    for name in named:
        assert any(node == name or node.startswith(f"{name}[") for node in collected), name
