"""The help and the shell completion, both drawn by typer from the table of flags.

This is the only module that imports typer; a launch never comes here.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
import typer.completion
import typer.main
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from dlrover_run import exit_codes
from dlrover_run.command_line import rendezvous_conf
from dlrover_run.command_line.argv import UsageError, cut
from dlrover_run.command_line.options import OTHER, Flag
from dlrover_run.command_line.program import Program
from dlrover_run.coordination.rules import Rules

_DRAWN_BY_TYPER = ("install_completion", "show_completion")


def answer(words: Sequence[str], program: Program) -> int:
    """Answer `--help`, a request about completion, or the shell's own question; the exit code."""
    completing = program.completion_variable in os.environ
    command: Any = typer.main.get_command(_application(program, with_underscores=completing))
    if completing and _script_is_typed(program, os.environ):
        # After the script come its own arguments: no flag of ours is offered there, and the shell falls back on files.
        command.params.clear()
    for parameter in command.params:
        if parameter.name in _DRAWN_BY_TYPER:
            flag = program.by_dest[parameter.name]
            parameter.rich_help_panel, parameter.metavar, parameter.help = OTHER, f"[{flag.value}]", flag.help
    if completing or "--help" not in words:
        try:
            command.main(list(words), prog_name=program.name, complete_var=program.completion_variable)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1
        return 0
    # Parsing would import pydantic, which doubles the time that this page takes.
    with typer.Context(command, info_name=program.name) as context:
        # With rich the text is printed on the way and what comes back is empty.
        if text := context.get_help():
            typer.echo(text)
    if program.meets:
        _print_keys(program)
    return 0


def install_completion(program: Program, shell: str) -> int:
    """Install completion for a shell, whichever this process was started from; the exit code. Raises OSError."""
    command: Any = typer.main.get_command(_application(program, with_underscores=False))
    with typer.Context(command, info_name=program.name) as context:
        try:
            typer.completion.install_callback(context, command.params[0], shell)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1
    return exit_codes.SUCCESS


def print_completion(program: Program, shell: str) -> int:
    """Print the script that teaches a shell to complete this program's command line; the exit code."""
    script = _tcsh_script(program) if shell == "tcsh" else _typer_script(program, shell)
    if shell == "zsh":
        # In a file of `fpath` the script runs at the first request, which it would otherwise leave without an answer.
        function = f"_{program.name.replace('-', '_')}_completion"
        script += f'\nif [[ $zsh_eval_context[-1] == loadautofunc ]]; then {function} "$@"; fi'
    print(script)
    return exit_codes.SUCCESS


def _typer_script(program: Program, shell: str) -> str:
    os.environ[program.completion_variable] = f"source_{shell}"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        answer([], program)
    # zsh reads `#compdef` in the first line only, and typer begins with an empty one.
    return printed.getvalue().strip()


def _tcsh_script(program: Program) -> str:
    """typer does not support tcsh, which completes from a static table of rules."""
    rules = []
    for flag in program.table:
        if flag.value and not flag.bare:
            told = f"({' '.join(flag.choices)})" if flag.choices else "d" if flag.files else f"x:{flag.value}"
            rules += [f"n@{spelling}@{told}@" for spelling in flag.spellings]
    names = " ".join(flag.name for flag in program.table)
    rules += [f"c@--@({names})@", "p@*@f@"]
    return " ".join((f"complete {program.name}", *(f"'{rule}'" for rule in rules)))


def _print_keys(program: Program) -> None:
    """The keys of `--rdzv-conf` that have an effect, drawn as typer draws the flags."""
    defaults = Rules()
    keys = Table(show_header=False, box=None, pad_edge=False, expand=True)
    keys.add_column(style="bold cyan", no_wrap=True)
    keys.add_column(ratio=1)
    for key in rendezvous_conf.TABLE:
        if key.help and key.name not in program.no_keys:
            default = f" [dim]\\[default: {getattr(defaults, key.rule):g}][/]" if key.rule else ""
            keys.add_row(key.name, f"{key.help}.{default}")
    Console().print(Panel(keys, title="Keys of --rdzv-conf", title_align="left", border_style="dim"))


def _script_is_typed(program: Program, environ: Mapping[str, str]) -> bool:
    """Whether the words before the cursor already name a script."""
    # Bash cuts `--role=a` into three words before it hands them over.
    typed = re.sub(r"\s=\s", "=", environ.get("COMP_WORDS", "")) or environ.get("_TYPER_COMPLETE_ARGS", "")
    try:
        words = shlex.split(typed)[1:]
        return cut(words if typed[-1:].isspace() else words[:-1], program).script is not None
    except (UsageError, ValueError):
        return False


def _application(program: Program, *, with_underscores: bool) -> typer.Typer:
    completes = set(_DRAWN_BY_TYPER) <= program.by_dest.keys()
    app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=completes)
    define = app.command(
        help=program.about,
        epilog=program.epilog,
        options_metavar=program.usage,
        context_settings={"allow_extra_args": True, "allow_interspersed_args": False, "help_option_names": []},
    )
    define(_callback(list(_parameters(program, with_underscores))))
    return app


def _callback(parameters: list[inspect.Parameter]) -> Callable[..., None]:
    """A function with these parameters, which is how typer is told of flags."""

    def job(**_: object) -> None:
        """Never called: a launch reads its command line itself."""

    signed: Any = job
    signed.__signature__ = inspect.Signature(parameters)
    signed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return job


def _parameters(program: Program, with_underscores: bool) -> Iterator[inspect.Parameter]:
    for flag in program.table:
        if flag.dest in _DRAWN_BY_TYPER:
            continue
        yield _parameter(flag.dest, _kind(flag), _option(flag, hidden=False))
        if with_underscores and flag.dest != flag.name:
            # Understood in a half-typed line, but not offered: two spellings of everything would only be in the way.
            yield _parameter(f"{flag.dest}_underscored", _kind(flag), _option(flag, hidden=True))


def _parameter(name: str, kind: Any, declaration: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=declaration, annotation=kind)


def _kind(flag: Flag) -> Any:
    if flag.files:
        return Path
    # A flag with a value that may be left out is a switch to typer, which would take the next word for the value.
    return str if flag.value and not flag.bare else bool


def _option(flag: Flag, *, hidden: bool) -> Any:
    spellings = [f"--{flag.dest}"] if hidden else [f"--{flag.name}", *([flag.short] if flag.short else [])]
    return typer.Option(
        (flag.default or None) if _kind(flag) is not bool else False,
        *spellings,
        help=flag.help,
        metavar=f"[={flag.value}]" if flag.bare else flag.value or " ",
        rich_help_panel=flag.panel,
        show_default=bool(flag.value and flag.default),
        hidden=hidden,
        autocompletion=(lambda incomplete: [word for word in flag.choices if word.startswith(incomplete)])
        if flag.choices
        else None,
    )
