"""What pytest does for a shard: list the tests that exist, run exactly the given ones, and record each outcome."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def add_options(parser: pytest.Parser) -> None:
    """Add the options; `tests/conftest.py` calls this."""
    group = parser.getgroup("shards", "shards of long tests (used by `make test-long`)")
    group.addoption("--list-tests", type=Path, help="write the chosen tests to this file, one JSON object a line")
    group.addoption("--only-tests", type=Path, help="run the tests whose node ids are the lines of this file")
    group.addoption("--record", type=Path, help="add the outcome of each test to this file, one JSON object a line")


def configure(config: pytest.Config) -> None:
    """Register what the options ask for; `tests/conftest.py` calls this, in the processes of pytest-xdist too."""
    if only := config.getoption("only_tests"):
        config.pluginmanager.register(Selection(set(only.read_text().split("\n"))))
    if hasattr(config, "workerinput"):
        return
    if listed := config.getoption("list_tests"):
        config.pluginmanager.register(Listing(listed))
    if record := config.getoption("record"):
        config.pluginmanager.register(Recorder(record))


class Selection:
    """Deselects all tests but the given ones."""

    def __init__(self, ids: set[str]) -> None:
        self._ids = ids

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        dropped = [item for item in items if item.nodeid not in self._ids]
        items[:] = [item for item in items if item.nodeid in self._ids]
        config.hook.pytest_deselected(items=dropped)


class Listing:
    """Writes the tests that are left when all others are deselected."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        tests = [{"id": item.nodeid, "alone": bool(item.get_closest_marker("alone"))} for item in session.items]
        lines = [json.dumps(test) for test in tests]
        self._file.write_text("".join(f"{line}\n" for line in lines))


class Recorder:
    """Adds a line for each test as it ends, so that a run that is cut off keeps what it has."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._open: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._open.setdefault(report.nodeid, {"id": report.nodeid, "outcome": "passed", "seconds": 0.0})
        test["seconds"] += report.duration
        if report.failed:
            test["outcome"] = "failed"
            test.setdefault("reason", _last_line(report.longreprtext))
        elif report.skipped and test["outcome"] == "passed":
            test["outcome"] = "skipped"
            test["reason"] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        # pytest-xdist has one report for a test in which its process crashed, without a teardown.
        if report.when not in ("setup", "call"):
            self._write(self._open.pop(report.nodeid))

    def pytest_sessionfinish(self) -> None:
        """A test that has begun and not ended has no outcome."""
        self._open.clear()

    def _write(self, test: dict[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({**test, "seconds": round(test["seconds"], 2)}) + "\n")


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (errors or lines or [""])[0][:300]
