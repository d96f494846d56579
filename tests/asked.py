"""What a command line comes to: the job that is asked for, what is said about it, or the sentence that refuses it."""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from collections.abc import Mapping
from pathlib import Path

import pytest

from dlrover_run.cli import parse
from dlrover_run.spec import JobSpec, SpecError


def go_to_empty_place(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a working directory with one script, and no variable of the machine that could change a job."""
    for name in [*os.environ]:
        if name.startswith(("PET_", "DLROVER_", "NODE_", "WORKER_", "TORCHELASTIC_")) or name == "PYTHON_EXEC":
            monkeypatch.delenv(name)
    (directory / "train.py").write_text("")
    monkeypatch.chdir(directory)


def pretend_etcd3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the package for etcd where it can be found."""
    package = types.ModuleType("etcd3")
    package.__spec__ = importlib.machinery.ModuleSpec("etcd3", None)
    monkeypatch.setitem(sys.modules, "etcd3", package)


def count(kind: str, environ: Mapping[str, str]) -> int:
    """A machine with eight devices."""
    return {"auto": 8, "gpu": 8}[kind]


def told(line: str, **environ: str) -> tuple[JobSpec, list[str]]:
    """The job of these flags and variables, and what was said about them."""
    said: list[str] = []
    return parse([*line.split(), "train.py", "--lr"], environ, count_workers=count, warn=said.append), said


def refusal(line: str, **environ: str) -> str:
    """The one sentence with which this job is refused."""
    with pytest.raises(SpecError) as refused:
        told(line, **environ)
    sentence = str(refused.value)
    assert sentence.isprintable()
    assert sentence.endswith(".")
    return sentence
