"""What the processes of a job run, found on this machine before any of them starts."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from dlrover_run.command_line import flags, lookup
from dlrover_run.command_line.argv import CommandLine, UsageError
from dlrover_run.spec import Entrypoint

INTERPRETER_VARIABLE = "PYTHON_EXEC"
"""Names another interpreter than this one, as for torchrun."""


def need_script(line: CommandLine) -> str:
    """What stands where the script does; UsageError when nothing does."""
    if line.script is None:
        raise UsageError("No script was given: name what the workers run after the flags.")
    return line.script


def find_interpreter(environ: Mapping[str, str]) -> str:
    """The interpreter that runs the script. Raises SpecError when there is none of that name."""
    python = environ.get(INTERPRETER_VARIABLE) or sys.executable
    if python != sys.executable:
        lookup.find_program(python, environ, f"interpreter named by {INTERPRETER_VARIABLE}")
    return python


def find_python_program(line: CommandLine, environ: Mapping[str, str], *, module: bool) -> Entrypoint:
    """A script, or a module for `python -m`, with its interpreter. Raises SpecError when it is not there."""
    target = need_script(line)
    python = find_interpreter(environ)
    if module:
        flags.module("--module", target)
        lookup.find_module(target, environ, python)
        return Entrypoint("module", target, line.script_args, python)
    lookup.find_script(target)
    return Entrypoint("script", target, line.script_args, python)
