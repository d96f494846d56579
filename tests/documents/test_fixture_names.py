"""The tests run beside plug-ins of pytest that happen to be installed: no argument has the name of one's fixture."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]

TAKEN = {
    # pytest-benchmark ends the process of pytest-xdist in which a parameter with this name is no fixture of its own.
    "benchmark", "benchmark_weave",
    # pytest-cov, pytest-mock, pytest-xdist
    "cov", "no_cover", "mocker", "class_mocker", "module_mocker", "package_mocker", "session_mocker", "worker_id",
    "testrun_uid",
    # pytest-asyncio, anyio, aiohttp
    "event_loop", "event_loop_policy", "unused_tcp_port", "unused_tcp_port_factory", "unused_udp_port", "anyio_backend",
    "anyio_backend_name", "anyio_backend_options", "aiohttp_client", "aiohttp_server",
}  # fmt: skip


def clashes(source: str) -> Iterator[str]:
    """Return the arguments of tests and fixtures, and the names of fixtures, that are in TAKEN."""
    if TAKEN.isdisjoint(re.findall(r"\w+", source)):
        return
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        is_fixture = any("fixture" in ast.unparse(decorator) for decorator in node.decorator_list)
        if is_fixture or node.name.startswith("test_"):
            names = [node.name, *(argument.arg for argument in (*node.args.args, *node.args.kwonlyargs))]
            yield from (f"{node.name}: {name}" for name in names if name in TAKEN)


def test_no_test_or_fixture_has_a_name_of_another_plug_in() -> None:
    found = {str(file.relative_to(TESTS)): list(clashes(file.read_text())) for file in TESTS.rglob("*.py")}
    assert {file: names for file, names in found.items() if names} == {}


def test_a_clash_is_found() -> None:
    assert list(clashes("def test_it(benchmark): pass")) == ["test_it: benchmark"]
    assert list(clashes("@pytest.fixture(scope='module')\ndef mocker(): pass")) == ["mocker: mocker"]
    assert list(clashes("def help(worker_id): pass")) == []
