"""Which test executes which line of the modules that decide, measured once in a process of its own."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import coverage
import msgspec
import pytest
from _pytest.runner import runtestprotocol

from mutants.operators import functions


class Coverage(msgspec.Struct):
    """`seconds` of processor time of each test that passes, `lines` the tests of each line of each module as places in
    `tests`, and `branches` how many there are in the functions of a module, and how many were taken."""

    key: str
    tests: list[str]
    seconds: list[float]
    failed: list[str]
    lines: dict[str, dict[int, list[int]]]
    branches: dict[str, tuple[int, int]]


def runs(item: pytest.Item) -> bool:
    """Run one test with fixtures of its own; whether it passes or is skipped."""
    return not any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))


def measure(key: str, items: Sequence[pytest.Item], root: Path, modules: Mapping[str, str]) -> Coverage:
    """Run all tests, each in a context of its own. `modules` are the texts by path below `root`."""
    paths = {name: str(root / name) for name in modules}
    measured = coverage.Coverage(data_file=None, branch=True, include=list(paths.values()), config_file=False)
    tests: list[str] = []
    seconds: list[float] = []
    failed = []
    measured.start()
    for item in items:
        measured.switch_context(item.nodeid)
        began = time.process_time()
        if runs(item):
            tests.append(item.nodeid)
            seconds.append(round(time.process_time() - began, 4))
        else:
            failed.append(item.nodeid)
    measured.stop()
    number = {test: place for place, test in enumerate(tests)}
    data = measured.get_data()
    lines = {
        name: {
            line: sorted(number[test] for test in contexts if test in number)
            for line, contexts in data.contexts_by_lineno(path).items()
            if line > 0
        }
        for name, path in paths.items()
    }
    branches = {name: _branches(measured, paths[name], text) for name, text in modules.items()}
    return Coverage(key, tests, seconds, failed, lines, branches)


def _branches(measured: coverage.Coverage, path: str, text: str) -> tuple[int, int]:
    """How many branches the functions of a module have, and how many were taken. The rest of it runs at import."""
    inside = set(_lines_of_functions(text))
    counts = [exits for line, exits in measured.branch_stats(path).items() if line in inside]
    return sum(total for total, _ in counts), sum(taken for _, taken in counts)


def _lines_of_functions(text: str) -> Iterable[int]:
    for _, function in functions(ast.parse(text)):
        yield from range(function.lineno, (function.end_lineno or function.lineno) + 1)
