"""What whoever starts a launcher in a process of its own hands to it."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from dlrover_run.spec import JobSpec


@dataclass(frozen=True)
class LaunchRequest:
    """A job, as a launcher that is started with `command` reads it.

    `parent_pipe` is a descriptor of the parent-death pipe of the process that wants the job. `verdict` is one to which
    the Verdict is written as JSON.
    """

    spec: JobSpec
    parent_pipe: int
    verdict: int


def command(request_fd: int, module: str = "dlrover_run.launch") -> list[str]:
    """The command of a launcher that reads its LaunchRequest from this descriptor, by the function `run` of `module`,
    and finds modules where this process does: with `-m` a `random.py` in the person's working directory would take the
    place of Python's own."""
    path = [each for each in sys.path if isinstance(each, str)]
    code = f"import sys; sys.path[:] = {path}; from {module} import run; sys.exit(run())"
    return [sys.executable, "-c", code, str(request_fd)]
