"""Fixtures of the fault tests: jobs into which faults are injected."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from interpreters import interpreter
from job import EXAMPLE, Job, MakeJob


@pytest.fixture(scope="session")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generated click log."""
    directory = tmp_path_factory.mktemp("clicks") / "data"
    subprocess.run([sys.executable, EXAMPLE / "generate.py", directory], check=True, stdout=subprocess.DEVNULL)
    return directory


@pytest.fixture
def make_job(tensorflow: Path, clicks: Path, tmp_path: Path) -> Iterator[MakeJob]:
    """Create the one job of a test; the test fails if anything of it is left at the end."""
    jobs: list[Job] = []

    def make(script: str, **pace: str) -> Job:
        jobs.append(Job(tensorflow, script, clicks, tmp_path, **pace))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


@pytest.fixture(scope="session")
def undisturbed(clicks: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], float]:
    """The AUC of a run of that script without faults; it is computed once."""

    @cache
    def train(script: str) -> float:
        job = Job(interpreter(), script, clicks, tmp_path_factory.mktemp("undisturbed"))
        node = job.start("--ps=2", "--workers=1")
        auc = job.finish(node).auc
        job.close()
        return auc

    return train
