"""The typer application of a program: its subcommands, and the help and shell completion of its launch command line.

The launch command line is the callback of a typer group, whose options are made from the table of flags. typer draws
its help and completes it; a launch itself is parsed by `parse.py` and never imports this module. A subcommand is a
plain typer function that `Program.subcommands` names.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import re
import shlex
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import typer
import typer.completion
import typer.core
import typer.main
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from dlrover_run import exit_codes
from dlrover_run.command_line import rdzv_keys
from dlrover_run.command_line.flag import OTHER, Flag
from dlrover_run.command_line.parse import parse_argv
from dlrover_run.command_line.program import Program
from dlrover_run.spec import UsageError

_TYPER_OPTIONS = ("install_completion", "show_completion")
"""The options that typer adds itself."""

_USAGE_ERROR: type[Exception] = cast(Any, typer.BadParameter.__mro__[1])
"""typer's base class of errors in a command line, which it does not export."""


def run(program: Program, argv: Sequence[str]) -> int:
    """Run a subcommand, or answer the shell's request for candidates; the exit code. Raises SpecError."""
    completing = program.completion_variable in os.environ
    needed = program.subcommands.keys() if completing else {*argv[:1]}
    command = _command(program, needed, with_underscores=completing)
    if completing and _script_is_typed(program, os.environ):
        # Words after the script are its arguments: offer no flags, so that the shell falls back to file names.
        command.params.clear()
        command.commands.clear()
    try:
        code = command.main(
            list(argv),
            prog_name=program.name,
            complete_var=program.completion_variable,
            standalone_mode=False,
            obj=program,
        )
    except SystemExit as end:
        code = end.code
    except _USAGE_ERROR as error:
        message = str(cast(Any, error).format_message())
        number = next((word for word in argv[1:] if word.isdecimal()), None)
        if number is not None and message.startswith("Missing option '--nodes'"):
            message = f"Missing option '--nodes': did you mean --nodes={number}?"
        raise UsageError(message if message.endswith((".", "?")) else f"{message}.") from None
    return code if isinstance(code, int) else exit_codes.SUCCESS


def show_help(program: Program) -> int:
    command = _command(program)
    # Running the command would import pydantic, which doubles the time that this page takes.
    with typer.Context(command, info_name=program.name, obj=program) as context:
        # With rich the text is printed at once and the result is empty.
        if text := context.get_help():
            typer.echo(text)
    return exit_codes.SUCCESS


def install_completion(program: Program, shell: str | None) -> int:
    """Install the completion for a shell, None for the one that started this process. Raises OSError."""
    if shell is None:
        return run(program, ["--install-completion"])
    command = _command(program)
    with typer.Context(command, info_name=program.name) as context:
        try:
            typer.completion.install_callback(context, command.params[0], shell)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1
    return exit_codes.SUCCESS


def show_completion(program: Program, shell: str | None) -> int:
    """Print the completion script for a shell, None for the one that started this process."""
    if shell is None:
        return run(program, ["--show-completion"])
    script = _tcsh_script(program) if shell == "tcsh" else _typer_script(program, shell)
    if shell == "zsh":
        # In a file of `fpath` the script runs at the first request, which it would otherwise leave without an answer.
        function = f"_{program.name.replace('-', '_')}_completion"
        script += f'\nif [[ $zsh_eval_context[-1] == loadautofunc ]]; then {function} "$@"; fi'
    print(script)
    return exit_codes.SUCCESS


def flag_option(flag: Flag, complete: Callable[..., list[str]] | None = None) -> Any:
    """The option of a subcommand that takes a flag of the launch command line, for `Annotated`. `complete` returns the
    shell's candidates for its value, by default those of the launch command line."""
    return typer.Option(
        f"--{flag.name}",
        help=flag.help,
        metavar=flag.value,
        rich_help_panel=flag.panel,
        show_default=False,
        autocompletion=complete or _candidates(flag),
    )


def _candidates(flag: Flag) -> Callable[..., list[str]] | None:
    """What completes the value of a flag; None for one whose values are not known."""
    if flag.dest == "rdzv_conf":
        return complete_keys
    if not flag.choices:
        return None
    return lambda incomplete: [word for word in flag.choices if word.startswith(incomplete)]


def complete_keys(incomplete: str) -> list[str]:
    """The keys for the last of the pairs `key=value,key=value`."""
    before, comma, begun = incomplete.rpartition(",")
    if "=" in begun:
        return []
    return [f"{before}{comma}{key.name}=" for key in rdzv_keys.TABLE if key.help and key.name.startswith(begun)]


def _typer_script(program: Program, shell: str) -> str:
    os.environ[program.completion_variable] = f"source_{shell}"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run(program, [])
    # zsh reads `#compdef` in the first line only, and typer begins with an empty one.
    return printed.getvalue().strip()


def _tcsh_script(program: Program) -> str:
    """typer does not support tcsh, which completes from a static table of rules."""
    rules = []
    for flag in program.table:
        if flag.value and not flag.const:
            candidates = f"({' '.join(flag.choices)})" if flag.choices else "d" if flag.files else f"x:{flag.value}"
            rules += [f"n@{spelling}@{candidates}@" for spelling in flag.spellings]
    names = " ".join(flag.name for flag in program.table)
    rules += [f"c@--@({names})@", "p@*@f@"]
    return " ".join((f"complete {program.name}", *(f"'{rule}'" for rule in rules)))


def _print_keys(program: Program, *, connection_only: bool = False) -> None:
    """The keys of `--rdzv-conf` that have an effect, drawn as typer draws the flags; or only those that a command for
    running jobs reads. Called after the help of a launcher, and after that of a command which takes `--rdzv-conf`."""
    defaults = rdzv_keys.defaults()
    keys = Table(show_header=False, box=None, pad_edge=False, expand=True)
    keys.add_column(style="bold cyan", no_wrap=True)
    keys.add_column(ratio=1)
    for key in rdzv_keys.TABLE:
        read = key.name in rdzv_keys.CONNECTION_KEYS if connection_only else key.name not in program.ignored_keys
        if key.help and read:
            default = f" [dim]\\[default: {defaults[key.name]:g}][/]" if key.name in defaults else ""
            keys.add_row(key.name, f"{key.help}.{default}")
    Console().print(Panel(keys, title="Keys of --rdzv-conf", title_align="left", border_style="dim"))


def _script_is_typed(program: Program, environ: Mapping[str, str]) -> bool:
    """Whether the words before the cursor already name a script."""
    # Bash splits `--role=a` into three words before it passes them.
    typed = re.sub(r"\s=\s", "=", environ.get("COMP_WORDS", "")) or environ.get("_TYPER_COMPLETE_ARGS", "")
    try:
        words = shlex.split(typed)[1:]
        before_cursor = words if typed[-1:].isspace() else words[:-1]
        if before_cursor and before_cursor[0] in program.subcommands:
            return False
        return parse_argv(before_cursor, program).script is not None
    except (UsageError, ValueError):
        return False


class _Group(typer.core.TyperGroup):
    """The launch command line and its subcommands."""

    _page = ""
    """Which part of the help is being printed, if any. typer prints flags before commands; here commands come first."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        program, about, epilog = ctx.find_root().obj, self.help, self.epilog
        self._page, self.epilog = "commands", None
        super().format_help(ctx, formatter)
        self._page, self.epilog, self.help = "flags", epilog, None
        super().format_help(ctx, formatter)
        self._page, self.help = "", about
        _print_keys(program)

    def get_usage(self, ctx: Any) -> str:
        name = ctx.find_root().obj.name
        if self._page == "commands":
            return f"{super().get_usage(ctx).rstrip()}\n       {name} COMMAND [JOB] [FLAGS]"
        return "Flags of a launch:" if self._page == "flags" else str(super().get_usage(ctx))

    def get_params(self, ctx: Any) -> Any:
        return [] if self._page == "commands" else super().get_params(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        return [] if self._page == "flags" else super().list_commands(ctx)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """The candidates. Without a first letter only flags are offered, because the next word is most often a file."""
        candidates = super().shell_complete(ctx, incomplete)
        return [one for one in candidates if incomplete or one.value not in self.commands]


class _Subcommand(typer.core.TyperCommand):
    """A subcommand of a launch command line."""

    def get_help_option(self, ctx: Any) -> Any:
        """The option --help, drawn as that of the launch command line."""
        option: Any = super().get_help_option(ctx)
        if option is not None:
            option.rich_help_panel, option.metavar, option.help = OTHER, " ", "Show this page."
        return option

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line: a word that may be left out is in brackets."""
        words: list[Any] = [parameter for parameter in self.params if parameter.param_type_name == "argument"]
        return ["[FLAGS]", *(word.metavar if word.required else f"[{word.metavar}]" for word in words)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        parameter: Any
        for parameter in self.params:
            # Python's names of types (<str>, <bool>) tell a user nothing.
            if parameter.param_type_name == "argument":
                parameter.display_type_rich = lambda ctx: ""
            elif parameter.metavar is None:
                parameter.metavar = " "
        super().format_help(ctx, formatter)
        if any(parameter.name == "rdzv_conf" for parameter in self.params):
            _print_keys(ctx.find_root().obj, connection_only=True)


def _command(program: Program, needed: Container[str] = (), *, with_underscores: bool = False) -> Any:
    """The command line. Of subcommands that are not `needed` only the names and summaries are there."""
    app = typer.Typer(
        cls=_Group,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        invoke_without_command=True,
        help=program.about,
        epilog=program.epilog,
        options_metavar=program.usage,
        subcommand_metavar="",
        context_settings={"help_option_names": []},
    )
    app.callback()(with_parameters(_launch, list(_parameters(program, with_underscores))))
    for name, (path, summary) in program.subcommands.items():
        subcommand, text = _listed, summary
        if name in needed:
            module, _, function = path.partition(":")
            subcommand = getattr(importlib.import_module(module), function)
            text = inspect.getdoc(subcommand) or ""
        register = app.command(
            name,
            cls=_Subcommand,
            # typer keeps line breaks within a paragraph.
            help=re.sub(r"(?<!\n)\n(?!\n)", " ", text),
            options_metavar="[FLAGS]",
            context_settings={
                "help_option_names": ["--help", "-h"],
                # Both spellings, as on the launch command line.
                "token_normalize_func": lambda word: word.replace("_", "-"),
            },
        )
        register(subcommand)
    command: Any = typer.main.get_command(app)
    for parameter in command.params:
        if parameter.name in _TYPER_OPTIONS:
            flag = program.by_dest[parameter.name]
            parameter.rich_help_panel, parameter.metavar, parameter.help = OTHER, f"[{flag.value}]", flag.help
    return command


def with_parameters(function: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> Callable[..., Any]:
    """The function, of which typer takes these parameters for its own. Called for the launch command line here, and for
    each command for running jobs."""
    signed: Any = function
    signed.__signature__ = inspect.Signature(parameters)
    signed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


def _listed() -> None:
    """Stands for a subcommand in the list of them."""


def _launch(**_: object) -> None:
    """Does nothing: it runs before a subcommand. A launch is parsed without typer."""


def _parameters(program: Program, with_underscores: bool) -> Iterator[inspect.Parameter]:
    for flag in program.table:
        if flag.dest in _TYPER_OPTIONS:
            continue
        yield _parameter(flag.dest, _kind(flag), _option(flag, hidden=False))
        if with_underscores and flag.dest != flag.name:
            # Accepted before the cursor, but not offered: two spellings of every flag would only be in the way.
            yield _parameter(f"{flag.dest}_underscored", _kind(flag), _option(flag, hidden=True))


def _parameter(name: str, kind: Any, declaration: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=declaration, annotation=kind)


def _kind(flag: Flag) -> Any:
    if flag.files:
        return Path
    # A flag with an optional value is a switch to typer, which would otherwise take the next word for the value.
    return str if flag.value and not flag.const else bool


def _option(flag: Flag, *, hidden: bool) -> Any:
    spellings = [f"--{flag.dest}"] if hidden else [f"--{flag.name}", *([flag.short] if flag.short else [])]
    return typer.Option(
        (flag.default or None) if _kind(flag) is not bool else False,
        *spellings,
        help=flag.help,
        metavar=f"[={flag.value}]" if flag.const else flag.value or " ",
        rich_help_panel=flag.panel,
        show_default=bool(flag.value and flag.default),
        hidden=hidden,
        autocompletion=_candidates(flag),
    )
