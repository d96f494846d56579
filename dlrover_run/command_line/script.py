"""The script that a command line names, or the module, with the interpreter that runs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from dlrover_run.command_line import values
from dlrover_run.command_line.checks import DELETED, STANDARD_INPUT, check_module, check_program, working_directory
from dlrover_run.command_line.parse import CommandLine
from dlrover_run.command_line.program import Program
from dlrover_run.command_line.suggestions import instead_of_script
from dlrover_run.spec import Entrypoint, SpecError, UsageError

INTERPRETER_VARIABLE = "PYTHON_EXEC"
"""Names another interpreter than this one, as for torchrun."""


def require_script(line: CommandLine) -> str:
    """The script of the command line. Raises UsageError when there is none. Called before anything else is read of the
    entry point, by dlrover-run and by `python_entrypoint`."""
    if line.script is None:
        raise UsageError("No script was given: name the script to run after the flags.")
    return line.script


def python_entrypoint(line: CommandLine, environ: Mapping[str, str], program: Program, *, module: bool) -> Entrypoint:
    """A script, or a module for `python -m`, with its interpreter, for a launch by that program. Raises SpecError when
    it does not exist. Called by both launchers."""
    target = require_script(line)
    python = environ.get(INTERPRETER_VARIABLE) or sys.executable
    if python != sys.executable:
        check_program(python, environ, f"interpreter named by {INTERPRETER_VARIABLE}")
    if module:
        values.module("--module", target)
        check_module(target, environ, python)
        return Entrypoint("module", target, line.script_args, python)
    check_script(target, line.script_args, program)
    return Entrypoint("script", target, line.script_args, python)


def check_script(path: str, args: Sequence[str], program: Program) -> None:
    """Refuse a script that Python cannot run: neither a file nor a directory with a `__main__`. `args` are its
    arguments, which help to guess what was meant. Called for a script, and by dlrover-run for one of `--run-path`."""
    if path == STANDARD_INPUT:
        return
    if os.path.isdir(path):
        if not any(os.path.exists(os.path.join(path, name)) for name in ("__main__.py", "__main__.pyc")):
            raise SpecError(f"The script {path!r} is a directory without a __main__.py: name a file, or add one.")
        return
    if not os.path.exists(path):
        where = "" if os.path.isabs(path) else f" in {working_directory() or DELETED}"
        remedy = instead_of_script(path, args, program.name, program.subcommands)
        raise SpecError(
            f"The script {path!r} does not exist{where}: {remedy or 'check the path (-m runs a module instead).'}"
        )
    if not os.access(path, os.R_OK):
        raise SpecError(f"The script {path!r} cannot be read by this user: change its permissions.")


def check_standard_input(entrypoint: Entrypoint, workers: int, max_restarts: int) -> None:
    """Refuse a script from standard input that would have to be read twice: the second worker, or the same one after a
    restart, would run an empty program, and succeed."""
    if entrypoint.kind not in ("script", "run_path") or entrypoint.target != STANDARD_INPUT:
        return
    if workers > 1 or max_restarts > 0:
        why = f"{workers} workers share" if workers > 1 else "a restart would need again"
        raise SpecError(f"The script '-' is standard input, which {why}, and it can be read only once: name a file.")
