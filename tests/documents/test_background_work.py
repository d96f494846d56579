"""Work in the background belongs to a group that waits for it, so no exception of it ends unseen; and no wait loses an
answer that came while this process was stopped."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

DETACHED = {"dlrover_run/background.py": 2}
"""Tasks outside of a group, by module: `Background.start` and `beside`, which are such owners themselves."""


def detached(source: str) -> int:
    """How many tasks a module starts on the loop itself, and not in a group."""
    found = 0
    if not any(name in source for name in ("ensure_future", "create_task")):
        return found
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        in_group = any(word in owner for word in ("tasks", "group", "background"))
        found += name == "ensure_future" or (name == "create_task" and not in_group)
    return found


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("async def f(tasks):\n    tasks.create_task(g())", 0),
        ("self._background.create_task(work)", 0),
        ("asyncio.create_task(g())", 1),
        ("asyncio.get_running_loop().create_task(g())", 1),
        ("from asyncio import ensure_future\nensure_future(g())", 1),
    ],
)
def test_a_task_outside_of_a_group_is_found(source: str, number: int) -> None:
    assert detached(source) == number


def test_no_task_is_started_outside_of_a_group_but_the_known_ones() -> None:
    files = [path for package in ("dlrover_run", "tf_ps_runner") for path in (ROOT / package).rglob("*.py")]
    found = Counter({str(path.relative_to(ROOT)): detached(path.read_text()) for path in files})
    assert +found == Counter(DETACHED)


LIMITS = {"dlrover_run/background.py": 2}
"""Limits of asyncio, by module: those of `TimeLimit` and `wait_for_event`, which lose no answer after a pause."""


def limits(source: str) -> int:
    """How often a module limits a wait by what asyncio has for it."""
    names = ("timeout", "timeout_at", "wait_for")
    if not any(f"asyncio.{name}" in source for name in names):
        return 0
    return sum(
        isinstance(node, ast.Call) and ast.unparse(node.func) in [f"asyncio.{name}" for name in names]
        for node in ast.walk(ast.parse(source))
    )


@pytest.mark.parametrize("wait", ["async with asyncio.timeout(3): pass", "await asyncio.wait_for(g(), 3)"])
def test_a_limit_of_asyncio_is_found(wait: str) -> None:
    assert limits(f"async def f():\n    {wait}") == 1


def test_each_wait_with_a_limit_takes_what_came_during_a_pause() -> None:
    files = [path for package in ("dlrover_run", "tf_ps_runner") for path in (ROOT / package).rglob("*.py")]
    found = Counter({str(path.relative_to(ROOT)): limits(path.read_text()) for path in files})
    assert +found == Counter(LIMITS)
