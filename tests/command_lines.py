"""Reads command lines for tests: the job, the warnings, or the error."""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dlrover_run.api import LaunchConfig, elastic_launch
from dlrover_run.cli import parse
from dlrover_run.cluster_environment import MARKERS
from dlrover_run.spec import JobSpec, SpecError


def isolate(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a working directory with one script, and remove every variable that could change a job."""
    for name in [*os.environ]:
        if name.startswith(("PET_", "DLROVER_", "NODE_", "WORKER_", "TORCHELASTIC_")) or name == "PYTHON_EXEC":
            monkeypatch.delenv(name)
    for markers in MARKERS.values():
        for name in markers:
            monkeypatch.delenv(name, raising=False)
    (directory / "train.py").write_text("")
    monkeypatch.chdir(directory)


def fake_etcd3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the etcd package appear to be installed."""
    package = types.ModuleType("etcd3")
    package.__spec__ = importlib.machinery.ModuleSpec("etcd3", None)
    monkeypatch.setitem(sys.modules, "etcd3", package)


def count(kind: str, environ: Mapping[str, str]) -> int:
    """The devices of a machine that has eight."""
    return {"auto": 8, "gpu": 8}[kind]


def parsed(line: str, **environ: str) -> tuple[JobSpec, list[str]]:
    """The job of these flags and variables, and its warnings."""
    warnings: list[str] = []
    return parse([*line.split(), "train.py", "--lr"], environ, count_workers=count, warn=warnings.append), warnings


def error(line: str, **environ: str) -> str:
    """The error of these flags and variables."""
    with pytest.raises(SpecError) as raised:
        parsed(line, **environ)
    sentence = str(raised.value)
    assert sentence.isprintable()
    assert sentence.endswith(".")
    return sentence


def launched(config: LaunchConfig, monkeypatch: pytest.MonkeyPatch) -> JobSpec:
    """The job of a configuration from Python; nothing is started."""
    jobs: list[JobSpec] = []

    def take(spec: JobSpec) -> dict[int, Any]:
        jobs.append(spec)
        return {}

    monkeypatch.setattr("dlrover_run.api.launch_from_python", take)
    elastic_launch(config, "ls")()
    return jobs[0]
