"""`docs/published-experiments.md` names tests that exist, lines that these look for, and verbs of the script."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from doc_pages import DOCS

TESTS = Path(__file__).parents[1]
SCRIPT = TESTS.parent / "scripts" / "start_chaos.sh"
TEXT = (DOCS / "published-experiments.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in TEXT.splitlines()
    if line.startswith("| ") and not line.startswith("| experiment ")
]


def test_the_rows_are_found() -> None:
    assert len(ROWS) == 16
    assert {len(row) for row in ROWS} == {5}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_experiment_names_a_test_and_a_line_that_it_looks_for(row: list[str]) -> None:
    named = re.fullmatch(r"`(test_\w+\.py)::(test_\w+)`", row[4])
    assert named is not None
    (file,) = TESTS.rglob(named[1])
    source = file.read_text()
    functions = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    assert named[2] in functions
    shown = re.match(r"`([^`]+)`", row[3])
    assert (shown is None) == (row[3] == "the same job")
    assert shown is None or shown[1] in source, shown


def test_each_verb_and_setting_of_the_script_exists() -> None:
    verbs = re.findall(r"start_chaos\.sh ([\w-]+) &", TEXT)
    assert set(verbs) >= {"kill-process", "kill-node", "cpu-overload", "network-loss", "memory-overload"}
    script = SCRIPT.read_text()
    for word in {*verbs, *re.findall(r"CHAOS_\w+", TEXT)}:
        assert re.search(rf"(?<![\w-]){word}(?![\w-])", script), word
