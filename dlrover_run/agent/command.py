"""The command line of one worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dlrover_run.spec import Entrypoint

FUNCTION_WORKER = "dlrover_run.agent.function_worker"

# The script's directory is no part of sys.path and the code is no frame of a file of ours: what runpy itself gives.
_RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def command_line(entrypoint: Entrypoint, args: Sequence[str]) -> tuple[str, ...]:
    """What is executed for a worker whose own arguments are `args` (as torchrun, `-u` included)."""
    if entrypoint.kind == "program":
        return (entrypoint.target, *args)
    python = (entrypoint.python, "-u")
    if entrypoint.kind == "run_path":
        return (*python, "-c", _RUN_PATH, entrypoint.target, *args)
    kind, target = python_program(entrypoint) or ("script", entrypoint.target)
    return (*python, "-m", target, *args) if kind == "module" else (*python, target, *args)


def python_program(entrypoint: Entrypoint) -> tuple[Literal["script", "module", "run_path"], str] | None:
    """What an interpreter is to run, as (kind, target); None for a program of which nothing is known."""
    if entrypoint.kind == "program":
        return None
    if entrypoint.kind == "function":
        return "module", FUNCTION_WORKER
    return entrypoint.kind, entrypoint.target
