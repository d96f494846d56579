"""What a command line answers by itself: a sentence about a mistake, its help, its version, the shell's completion."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dlrover_run import exit_codes
from dlrover_run.command_line import flags
from dlrover_run.command_line.argv import UsageError
from dlrover_run.command_line.options import THIS_SHELL, Flag
from dlrover_run.command_line.program import Program
from dlrover_run.spec import SpecError


def say(program: Program, sentence: str) -> None:
    """Print a line for the person, beside what the job prints."""
    print(f"{program.name}: {sentence}", file=sys.stderr)


def refuse(program: Program, mistake: SpecError) -> int:
    """Print what is wrong; the exit code."""
    say(program, str(mistake))
    if isinstance(mistake, UsageError):
        print(f"Try '{program.name} --help'.", file=sys.stderr)
    return exit_codes.BAD_COMMAND_LINE


def answer(program: Program, request: Flag, text: str = "") -> int:
    """Answer a flag that starts no job, given with this value; the exit code. SpecError when it has no such value."""
    # Nothing behind a `=` is no bare flag, unless it has no value that it might lack.
    if request.choices and (text != request.bare or not request.bare):
        flags.choice(request.spellings[0], text, request.choices)
    if request.name == "version":
        from importlib.metadata import version

        print(f"{program.name} {version('dlrover-run')}")
        return exit_codes.SUCCESS
    if request.name == "install-completion" and text:
        return _install_completion(program, text)
    if request.choices and text != request.bare:
        from dlrover_run.command_line.manual import print_completion

        return print_completion(program, text)
    return show(program, [request.spellings[0]])


def _install_completion(program: Program, shell: str) -> int:
    from dlrover_run.command_line.manual import install_completion

    try:
        if shell == THIS_SHELL:
            return show(program, ["--install-completion"])
        return install_completion(program, shell)
    except OSError as error:
        remedy = "--show-completion prints what to install by hand"
        raise SpecError(f"--install-completion cannot write {error.filename} ({error.strerror}): {remedy}.") from None


def show(program: Program, words: Sequence[str]) -> int:
    """Answer a request for help or completion, or the shell's own question; the exit code."""
    from dlrover_run.command_line.manual import answer

    return answer(words, program)
