"""The command line of one worker."""

from __future__ import annotations

from ..spec import Entrypoint
from .environment import fill_macros

# The script's directory is no part of sys.path and the code is no frame of a file of ours: what runpy itself gives.
_RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def command_line(entrypoint: Entrypoint, local_rank: int) -> tuple[str, ...]:
    """What is executed for the worker with this local rank, macros filled in (as torchrun, `-u` included)."""
    args = fill_macros(entrypoint.args, local_rank)
    if entrypoint.kind == "program":
        return (entrypoint.target, *args)
    python = (entrypoint.python, "-u")
    if entrypoint.kind == "module":
        return (*python, "-m", entrypoint.target, *args)
    if entrypoint.kind == "run_path":
        return (*python, "-c", _RUN_PATH, entrypoint.target, *args)
    if entrypoint.kind == "function":
        return (*python, "-m", "dlrover_run.agent.function_worker", *args)
    return (*python, entrypoint.target, *args)
