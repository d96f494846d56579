"""Tests with real TensorFlow processes.

They share the modules of `tests/support/`, which the conftest of `tests/` adds to the path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from interpreters import interpreter
from pretended import PRETEND, Job, is_of
from support.cluster import is_master
from support.harness import WAIT, Mailbox


@pytest.fixture
def tensorflow(request: pytest.FixtureRequest) -> Path:
    """An interpreter with TensorFlow 2.21 and tf-keras, or, for the parameter 2.15, with that version and its
    estimator.
    """
    return interpreter(getattr(request, "param", "2.21"))


@pytest.fixture
def start(mailbox: Mailbox) -> Iterator[Callable[..., Job]]:
    """Start one job. A process of it that is left at the end fails the test."""
    jobs: list[Job] = []

    def begin(*flags: str, args: tuple[str, ...] = (), script: Path = PRETEND) -> Job:
        jobs.append(Job(mailbox, *flags, args=args, script=script))
        return jobs[-1]

    yield begin
    for job in jobs:
        left = [each for each in psutil.process_iter(["environ"]) if is_of(each, job)]
        if job.process.poll() is not None:
            # The master of a job exits after the last node has left, which may be after the exit of that node.
            psutil.wait_procs([each for each in left if is_master(each)], WAIT)
            # A process that was exiting at the first look has exited now.
            left = [each for each in left if is_of(each, job)]
        found = [each.as_dict(["pid", "name", "status", "cmdline"]) for each in left]
        for process in left:
            process.kill()
        if job.process.poll() is None:
            job.process.kill()
            job.process.communicate()
        assert not found
