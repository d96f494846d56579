"""Work in the background belongs to a group that waits for it: no exception of it ends unseen."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

DETACHED = {
    "dlrover_run/background.py": 2,
    "dlrover_run/features/local_nodes/cluster_master.py": 1,
    "dlrover_run/features/node_check/node/check_runner.py": 3,
    "dlrover_run/observe/tick.py": 1,
    "dlrover_run/master/command.py": 1,
    "dlrover_run/master/session.py": 2,
    "dlrover_run/rendezvous/master/client.py": 1,
    "dlrover_run/rendezvous/reconnect.py": 2,
    "dlrover_run/store/etcd/connection.py": 1,
    "dlrover_run/torchrun/logs_specs.py": 1,
    "dlrover_run/workers/cause_collector.py": 1,
    "dlrover_run/workers/round.py": 2,
    "dlrover_run/workers/starter.py": 2,
    "dlrover_run/workers/template_client.py": 1,
    "tf_ps_runner/agent/liveness.py": 1,
    "tf_ps_runner/agent/supervisor.py": 1,
}
"""Tasks outside of a group, by module, each with an owner that awaits it by hand. The numbers only become smaller."""


def detached(source: str) -> int:
    """How many tasks a module starts on the loop itself, and not in a group."""
    found = 0
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
