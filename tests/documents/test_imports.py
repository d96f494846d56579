"""The modules of both packages import each other in one direction only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from dlrover_run.devices import holders

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("dlrover_run", "tf_ps_runner")


def modules(root: Path, packages: tuple[str, ...] = PACKAGES) -> dict[str, Path]:
    """Each module of the packages by its full name."""
    found = {}
    for package in packages:
        for file in (root / package).rglob("*.py"):
            parts = file.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(name: str, file: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules that a module imports, also inside functions; imports for the type checker alone are ignored."""
    tree = ast.parse(file.read_text())
    unread = {id(each) for node in ast.walk(tree) if _for_types_only(node) for each in ast.walk(node)}
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree):
        if id(node) in unread:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                found = submodule if submodule in known else source
                if found in known and found != name:
                    yield found


def _for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other in a circle, each circle as a path from its first module back to itself."""
    found: list[list[str]] = []
    done: set[str] = set()

    def follow(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
        elif module not in done:
            for other in sorted(graph[module]):
                follow(other, [*path, module])
            done.add(module)

    for module in sorted(graph):
        follow(module, [])
    return found


def graph(root: Path, packages: tuple[str, ...] = PACKAGES) -> dict[str, set[str]]:
    """Which modules each module imports."""
    known = modules(root, packages)
    return {name: set(imported(name, file, known)) for name, file in known.items()}


@cache
def product_graph() -> dict[str, set[str]]:
    return graph(ROOT)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(product_graph()) == []


@pytest.mark.parametrize(
    "text", ["from .two import x", "from sample import two", "import sample.two", "def f():\n    from . import two"]
)
def test_a_circle_is_found_in_any_syntax(tmp_path: Path, text: str) -> None:
    package = tmp_path / "sample"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text(text)
    (package / "two.py").write_text("from sample.one import y")
    assert circles(graph(tmp_path, ("sample",))) == [["sample.one", "sample.two", "sample.one"]]
    (package / "two.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sample.one import y\n"
    )
    assert circles(graph(tmp_path, ("sample",))) == []


def test_what_decides_knows_nothing_of_what_people_are_shown() -> None:
    """But for `Coordinator.status`, which asks for it."""
    found = {(name, each) for name, each in edges() if name.startswith("dlrover_run.coordination.")}
    shown = {name for name, each in found if each.startswith("dlrover_run.job_status")}
    assert shown == {"dlrover_run.coordination.coordinator"}


FEATURE_WORDS = re.compile(
    r"autoscal|survivor|straggl|(node|network).?check|checkpoint.memory|--hook\b|\bhangs\b|tensorflow|"
    r"parameter.?server|job.?cache|has_rounds|have_rounds",
    re.I,
)

CORE = (
    *(
        "coordination",
        "job_status",
        "rendezvous",
        "agent",
        "workers",
        "processes",
        "output",
        "command_line",
        "master",
        "transport",
    ),
    *("cli.py", "launch.py", "spec.py"),
)

NAMED = {
    "command_line/flags.py": "--auto-config turns the check on too",
    "coordination/records/activity.py": "a field of what `status --json` prints",
    "job_status/hang_text.py": "prints what is in that field",
    "coordination/records/size_choice.py": "fields of what `status --json` prints",
    "job_status/progress.py": "fields of what `status --json` prints",
    "job_status/status.py": "fields of what `status --json` prints",
}
"""Modules of the core that name a feature still, and why. A line goes when its module names none."""


def test_the_core_names_no_feature() -> None:
    room = ROOT / "dlrover_run"
    paths = [path for name in CORE for path in (room.glob(name) if "." in name else (room / name).rglob("*.py"))]
    assert len(paths) > 150
    found: dict[str, list[str]] = {}
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if FEATURE_WORDS.search(line):
                found.setdefault(str(path.relative_to(room)), []).append(f"{number}: {line.strip()}")
    assert {path: lines for path, lines in found.items() if path not in NAMED} == {}
    assert found.keys() == NAMED.keys()


def test_cluster_environments_are_read_below_the_command_line() -> None:
    below = "dlrover_run.environment"
    assert [each for name, each in edges() if name.startswith(below) and ".command_line" in each] == []


@pytest.mark.parametrize("module", ["agent.main", "rendezvous.kv.client", "master.server", "coordination.coordinator"])
def test_a_job_imports_nothing_that_decides_for_a_feature_that_it_does_not_have(module: str) -> None:
    deciding = (
        "tf_ps_runner",
        "autoscale.observer",
        "node_check.gate",
        "node_check.decision",
        "hangs.stalls",
        "hangs.stragglers",
    )
    script = f"import sys, dlrover_run.{module}; print([m for m in sys.modules if any(d in m for d in {deciding})])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"


def test_a_node_of_a_master_imports_the_records_and_nothing_that_decides() -> None:
    """Its start waits for these imports; the decisions are made in the master."""
    script = "import sys, dlrover_run.rendezvous.master_client.client; print(*sys.modules)"
    imported = subprocess.check_output([sys.executable, "-c", script], text=True).split()
    core = "dlrover_run.coordination."
    deciding = {"coordinator", "decision", "membership", "engine", "gate", "rounds.recovery", "rounds.gathering"}
    assert {name.removeprefix(core) for name in imported if name.startswith(core)} & deciding == set()


def edges() -> set[tuple[str, str]]:
    """Each import of one module of the product by another."""
    return {(name, each) for name, all_imported in product_graph().items() for each in all_imported}


def test_an_agent_imports_no_module_that_costs_every_launch_memory() -> None:
    """Each takes 0.7 MiB or more of the launcher and of the agent: OpenSSL behind hashlib, and what a job of one node
    does not use."""
    script = (
        "import sys, dlrover_run.launch, dlrover_run.agent.agent, dlrover_run.workers.adapter; "
        "print(sorted({name.partition('.')[0] for name in sys.modules} & "
        "{'_hashlib', 'secrets', 'grpc', 'psutil', 'torch'}))"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


@pytest.mark.parametrize(
    "rendezvous", [[], ["--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-conf=last_call_timeout=0.1"]]
)
def test_an_agent_without_a_store_has_no_ssl_and_collects_garbage(
    tmp_path: Path, rendezvous: list[str], free_port: int
) -> None:
    """A launch does not wait for OpenSSL, nor for a garbage collector that runs during the imports; in the loop it
    runs again."""
    script = tmp_path / "script.py"
    script.write_text("import os; print(open(f'/proc/{os.getppid()}/maps').read().count('/_ssl.'))")
    launcher = [sys.executable, "-m", "dlrover_run"]
    if rendezvous:
        rendezvous = [*rendezvous, f"--rdzv-endpoint=localhost:{free_port}"]
    assert subprocess.check_output([*launcher, "--nproc-per-node=1", *rendezvous, script], text=True) == "0\n"
    collecting = (
        "import gc, dlrover_run.__main__; from dlrover_run.processes import event_loop\n"
        "async def seen(): return gc.isenabled()\n"
        "print(gc.isenabled(), event_loop.run(seen()))"
    )
    assert subprocess.check_output([sys.executable, "-c", collecting], text=True) == "False True\n"


def test_a_launch_without_an_nvidia_device_imports_and_starts_nothing_for_one(tmp_path: Path) -> None:
    if holders.is_present():
        pytest.skip("this machine has an NVIDIA device")
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "for pid in open(f'/proc/{os.getppid()}/task/{os.getppid()}/children').read().split():\n"
        "    print(open(f'/proc/{pid}/comm').read().strip())\n"
    )
    launcher = [sys.executable, "-X", "importtime", "-m", "dlrover_run"]
    ended = subprocess.run([*launcher, script], capture_output=True, text=True, check=True)
    assert "dlrover-devices" not in ended.stdout
    # The process that prints them is the launcher, and from its fork on the agent.
    assert "dlrover_run.workers.round" in ended.stderr
    for module in (
        "pynvml",
        "features.device_errors",
        "features.device_memory",
        "features.job_cache.node",
        "devices.xids",
    ):
        assert module not in ended.stderr


@pytest.mark.parametrize(("arguments", "has_ssl"), [([], False), (["--web=0"], True), (["--web", "0"], True)])
def test_a_master_without_a_web_page_has_no_ssl(arguments: list[str], has_ssl: bool) -> None:
    """Its nodes wait for it, so it starts as an agent does."""
    seen = "import gc, dlrover_run.master.__main__, asyncio.sslproto as tls; print(bool(tls.ssl), gc.isenabled())"
    found = subprocess.check_output([sys.executable, "-c", seen, *arguments], text=True)
    assert found == f"{has_ssl} False\n"
