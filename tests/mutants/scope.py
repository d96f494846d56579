"""Which modules decide, and which tests are run against their mutants."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Group(NamedTuple):
    """Modules, as files and folders, and the tests that are to find their mutants."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]


SEEDS = "tests/mutants/seeds.py"

GROUPS = {
    "coordination": Group(
        ("dlrover_run/coordination",),
        (
            "tests/decisions/coordination",
            "tests/decisions/rendezvous",
            "tests/decisions/operate",
            "tests/backends/test_conformance.py",
            SEEDS,
        ),
    ),
    "node_check": Group(
        ("dlrover_run/features/node_check/decision", "dlrover_run/features/node_check/gate.py"),
        ("tests/decisions/features/node_check", SEEDS),
    ),
    "hangs": Group(
        tuple(f"dlrover_run/features/hangs/{folder}" for folder in ("search", "stalls", "stragglers")),
        ("tests/decisions/features/hangs",),
    ),
    "autoscale": Group(
        tuple(f"dlrover_run/features/autoscale/{n}.py" for n in ("decide", "measure", "model", "observer", "search")),
        ("tests/decisions/features/autoscale", "tests/simulation/test_autoscale_defects.py", SEEDS),
    ),
    "survivors": Group(
        ("dlrover_run/features/survivors/model.py", "dlrover_run/features/survivors/observer.py"),
        ("tests/decisions/features/survivors", SEEDS),
    ),
    "servers": Group(("tf_ps_runner/cluster",), ("tests/decisions/parameter_servers", SEEDS)),
    "queues": Group(("tf_ps_runner/data",), ("tests/tf/test_data_queue.py", "tests/tf/test_queues.py")),
}
"""All modules that are pure (values in, values out), with the tests of each group. A module that only tests of another
group execute counts as not covered: a group's own tests should show its rules."""

LAYERS = {
    "decisions": ("tests/decisions/",),
    "tf": ("tests/tf/",),
    "simulation": ("tests/mutants/", "tests/simulation/"),
    "backends": ("tests/backends/",),
}
"""The layers in the order in which they are run: the quickest first."""

CACHE = ROOT / ".mutants"
"""Results, by the digest of each function, and the coverage of the last run. Not in git."""

TABLE = ROOT / "tests/mutants/results.md"
EQUIVALENT = ROOT / "tests/mutants/equivalent.txt"


def modules(group: Group, *prefixes: str) -> dict[str, str]:
    """The texts of a group's modules by path, all of them or those below one of the paths."""
    found: dict[str, str] = {}
    for place in group.modules:
        path = ROOT / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            name = str(file.relative_to(ROOT))
            if file.name != "__init__.py" and (not prefixes or name.startswith(prefixes)):
                found[name] = file.read_text()
    return found


def layer(test: str) -> int:
    """The place of a test's layer."""
    for place, folders in enumerate(LAYERS.values()):
        if test.startswith(folders):
            return place
    return len(LAYERS) - 1
