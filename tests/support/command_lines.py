"""Reads command lines for tests: the job, the warnings, or the error."""

from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dlrover_run.api import LaunchConfig, elastic_launch
from dlrover_run.cli import parse
from dlrover_run.coordination.records.parts import combine
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.environment import MARKERS
from dlrover_run.features.hangs.stalls.rules import StallRules
from dlrover_run.features.hangs.stragglers.rules import StragglerRules
from dlrover_run.spec import JobSpec, SpecError

LIMIT = 60.0
"""Seconds that a child process of a test may take before the test fails."""

AT_NODE0 = "--rdzv-backend=c10d --rdzv-endpoint=node0:4000"


def isolate(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a working directory with one script, and remove every environment variable that could change a job."""
    for name in [*os.environ]:
        if name.startswith(("PET_", "DLROVER_", "NODE_", "WORKER_", "TORCHELASTIC_")) or name == "PYTHON_EXEC":
            monkeypatch.delenv(name)
    for markers in MARKERS.values():
        for name in markers:
            monkeypatch.delenv(name, raising=False)
    (directory / "train.py").write_text("")
    monkeypatch.chdir(directory)


def write_pems(directory: Path) -> dict[str, str]:
    """Write one file of each kind that TLS takes, and return them by name; only their first lines are ever read."""
    for name, kind in (("ca", "CERTIFICATE"), ("cert", "CERTIFICATE"), ("key", "EC PRIVATE KEY")):
        (directory / name).write_text(f"-----BEGIN {kind}-----\nAA==\n-----END {kind}-----\n")
    return {name: str(directory / name) for name in ("ca", "cert", "key")}


def run_python(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a Python process with these arguments and variables to its end."""
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def fake_etcd3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the etcd package appear to be installed."""
    package = types.ModuleType("etcd3")
    package.__spec__ = importlib.machinery.ModuleSpec("etcd3", None)
    monkeypatch.setitem(sys.modules, "etcd3", package)


def count(kind: str, environ: Mapping[str, str]) -> int:
    """Return the device count of a machine that has eight."""
    return {"auto": 8, "gpu": 8}[kind]


def parsed(line: str, **environ: str) -> tuple[JobSpec, list[str]]:
    """Return the job of these flags and variables, and its warnings."""
    warnings: list[str] = []
    return parse([*line.split(), "train.py", "--lr"], environ, count_workers=count, warn=warnings.append), warnings


def job(line: str, **environ: str) -> JobSpec:
    """Return the job of these flags and variables, which give no warning."""
    spec, warnings = parsed(line, **environ)
    assert warnings == []
    return spec


def watched(rules: JobRules) -> JobRules:
    """Return these rules with what a job has by default: stragglers are looked for, and stalls of several nodes."""
    stalls = (StallRules(watched=1),) if rules.max_nodes > 1 else ()
    return replace(rules, parts=combine(rules.parts, stalls, (StragglerRules(watched=1),)))


def error(line: str, **environ: str) -> str:
    """Return the error of these flags and variables."""
    with pytest.raises(SpecError) as raised:
        parsed(line, **environ)
    sentence = str(raised.value)
    assert sentence.isprintable()
    assert sentence.endswith(".")
    return sentence


def launched(config: LaunchConfig, monkeypatch: pytest.MonkeyPatch) -> JobSpec:
    """Return the job of a configuration from Python; nothing is started."""
    jobs: list[JobSpec] = []

    def take(spec: JobSpec) -> dict[int, Any]:
        jobs.append(spec)
        return {}

    monkeypatch.setattr("dlrover_run.api.launch_from_python", take)
    elastic_launch(config, "ls")()
    return jobs[0]
