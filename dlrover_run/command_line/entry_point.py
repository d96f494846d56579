"""The entry point of a program: launches a job, or hands the command line to the typer application.

A launch never imports typer or rich, which take several times as long as reading the command line. Help, completion and
subcommands do not import what reads and launches a job.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from dlrover_run import exit_codes
from dlrover_run.command_line import credentials, values
from dlrover_run.command_line.flags import CURRENT_SHELL
from dlrover_run.command_line.parse import CommandLine, parse_argv
from dlrover_run.command_line.program import Program
from dlrover_run.spec import SpecError, UsageError


def run(program: Program, argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments, by default those of this process; the exit code. An error is one line on
    stderr and exit code 2."""
    if argv is None:
        argv = sys.argv[1:]
        if program.completion_variable in os.environ:
            return _application(program, argv)
    if argv[:1] and argv[0] in program.subcommands:
        return _application(program, argv)
    job = job_or_code(program, argv)
    if isinstance(job, int):
        return job
    credentials.scrub_environment()
    try:
        return int(_launcher(program).launch(job))
    except SpecError as error:
        return report_error(program.name, error)


def job_or_code(program: Program, argv: Sequence[str]) -> Any:
    """The job of a command line, with its warnings printed, of the type that the program's `launch` takes; or the exit
    code after a request or an error. Called by `run`, and by `api.main` for Python code that has a command line."""
    try:
        line = parse_argv(argv, program)
        if line.request is not None:
            return _answer(program, line)
        return _launcher(program).read_job(line, lambda warning: report(program.name, f"warning: {warning}"))
    except SpecError as error:
        return report_error(program.name, error)


def refuse_reserved(program: Program, script: str) -> None:
    """Refuse a script whose name, without a directory, is the name of a subcommand. Called by dlrover-run for a script,
    also with `--run-path`; a module or a program cannot be confused with one."""
    if script in program.subcommands:
        problem = "is a subcommand, which must come before all flags"
        raise SpecError(f"{script!r} {problem}: give ./{script} to run a script of this name.")


def report(name: str, sentence: str) -> None:
    """Print a line of the program `name` for the user, beside the output of the job."""
    print(f"{name}: {sentence}", file=sys.stderr)


def report_error(name: str, error: SpecError) -> int:
    """Print an error; the exit code. Called when a command line is refused, or a launch, or a subcommand."""
    report(name, str(error))
    if isinstance(error, UsageError):
        print(f"Try '{name} --help'.", file=sys.stderr)
    return exit_codes.BAD_COMMAND_LINE


def _launcher(program: Program) -> Any:
    """The module with `read_job(line, warn)` and `launch(job)`, which returns the exit code. Both raise SpecError."""
    return importlib.import_module(program.launcher)


def _answer(program: Program, line: CommandLine) -> int:
    """Answer a request. Raises SpecError when its value is invalid."""
    request, value = line.request, line.request_value
    assert request is not None
    # Nothing after `=` is not the same as no value, unless the value is not optional.
    if request.choices and (value != request.const or not request.const):
        values.choice(request.spellings[0], value, request.choices)
    if request.name == "version":
        from importlib.metadata import version

        print(f"{program.name} {version('dlrover-run')}")
        return exit_codes.SUCCESS
    if request.name == "help" and value == request.short:
        from dlrover_run.command_line.short_help import short_help

        print(short_help(program))
        return exit_codes.SUCCESS
    from dlrover_run.command_line import help

    if request.name == "help":
        return help.show_help(program)
    if request.name != "install-completion":
        return help.show_completion(program, None if value == CURRENT_SHELL else value)
    try:
        return help.install_completion(program, None if value == CURRENT_SHELL else value)
    except OSError as error:
        remedy = "--show-completion prints the script for an installation by hand"
        raise SpecError(f"--install-completion cannot write {error.filename} ({error.strerror}): {remedy}.") from None


def _application(program: Program, argv: Sequence[str]) -> int:
    from dlrover_run.command_line import help

    gc.enable()
    try:
        return help.run(program, argv)
    except SpecError as error:
        return report_error(f"{program.name} {argv[0]}" if argv else program.name, error)
