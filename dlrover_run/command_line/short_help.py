"""The answer to `-h`: one screen with the commands and the flags that most jobs need. `--help` has all flags."""

from __future__ import annotations

import re
import textwrap

from dlrover_run.command_line.program import Program

WIDTH = 79


def short_help(program: Program) -> str:
    """The page, in plain text, so that neither typer nor rich are imported for it. Pure."""
    name = program.name
    flags = [program.by_dest[flag.replace("-", "_")] for flag in program.common]
    flags += [flag for flag in program.table if flag.common]
    rows = [(f"--{flag.name} {re.split('[|,]', flag.value)[0]}".rstrip(), _clause(flag.help)) for flag in flags]
    return "\n".join(
        (
            f"Usage: {name} {program.usage}",
            f"       {name} COMMAND [JOB] [FLAGS]",
            "",
            "Commands for running jobs:",
            *_table([(command, _clause(row.summary)) for command, row in program.subcommands.items()]),
            "",
            "Flags of most jobs:",
            *_table(rows),
            "",
            f"All flags: {name} --help.  Of a command: {name} COMMAND --help.",
        )
    )


def _table(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows) + 2
    return [f"  {name:{width}}{textwrap.shorten(text, WIDTH - 2 - width, placeholder=' ...')}" for name, text in rows]


def _clause(text: str) -> str:
    """The first clause of a help text, without marks of rich."""
    return re.split(r"[.:;](?:\s|$)", re.sub(r"\[/?\w*\]", "", text), maxsplit=1)[0]
