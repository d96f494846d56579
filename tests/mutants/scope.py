"""Which modules decide, and which tests are run against their mutants."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MODULES = (
    "dlrover_run/coordination",
    "dlrover_run/features/autoscale/decide.py",
    "dlrover_run/features/autoscale/measure.py",
    "dlrover_run/features/autoscale/model.py",
    "dlrover_run/features/autoscale/observer.py",
    "dlrover_run/features/autoscale/search.py",
    "dlrover_run/features/hangs/search",
    "dlrover_run/features/hangs/stalls",
    "dlrover_run/features/hangs/stragglers",
    "dlrover_run/features/node_check/decision",
    "dlrover_run/features/node_check/gate.py",
    "dlrover_run/features/survivors/model.py",
    "dlrover_run/features/survivors/observer.py",
    "tf_ps_runner/cluster",
    "tf_ps_runner/data",
)
"""Files and folders of modules that are pure: values in, values out."""

TESTS = (
    "tests/decisions",
    "tests/mutants/seeds.py",
    "tests/backends/test_conformance.py",
    "tests/tf/test_data_queue.py",
)
"""What is collected unless the command line names other paths."""

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


def modules(*prefixes: str) -> dict[str, str]:
    """The texts of the modules by path, all of them or those below one of the paths."""
    found: dict[str, str] = {}
    for place in MODULES:
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
