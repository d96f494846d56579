"""The programs with a launch command line: their names, flags, subcommands and the texts around their help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import NamedTuple

from dlrover_run.command_line.flag import FIRST_TORCHRUN, Flag
from dlrover_run.command_line.flags import TABLE, UNSUPPORTED_DLROVER_FLAGS
from dlrover_run.features import FEATURES


class Subcommand(NamedTuple):
    """A subcommand: its function as `module:function`, which is imported only to run it or to complete its flags, and
    the first sentence of its help, for the list of subcommands."""

    function: str
    summary: str


@dataclass(frozen=True)
class Program:
    """A program with a launch command line.

    `name` begins its messages. `launcher` is the module with `read_job` and `launch`, which help, completion and
    subcommands do not import. `about` and `epilog` are the help texts before and after the flags, `usage` the line
    above them. `subcommands` are described in `help.py`. `unsupported` says what to do instead of a flag that
    users bring from `unsupported_from`, by the name without dashes. `ignored_keys` are the keys of `--rdzv-conf` that
    have no effect. `common` are the flags of the core, by their names, that the short help shows.
    """

    name: str
    launcher: str
    table: tuple[Flag, ...]
    about: str
    epilog: str
    usage: str = "[FLAGS] SCRIPT [ARGS]..."
    subcommands: Mapping[str, Subcommand] = field(default_factory=dict)
    unsupported: Mapping[str, str] = field(default_factory=dict)
    unsupported_from: str = "DLRover"
    ignored_keys: frozenset[str] = frozenset()
    common: tuple[str, ...] = ()

    @property
    def completion_variable(self) -> str:
        """The variable that the shell's completion script sets when it asks for candidates. Read by the entry point to
        see whether a shell asks, and by what makes the completion scripts."""
        return f"_{self.name.replace('-', '_').upper()}_COMPLETE"

    @cached_property
    def by_dest(self) -> Mapping[str, Flag]:
        return {flag.dest: flag for flag in self.table}

    @cached_property
    def by_spelling(self) -> Mapping[str, Flag]:
        """The flags by each unabbreviated spelling."""
        return {spelling: flag for flag in self.table for spelling in flag.spellings}

    @cached_property
    def spellings(self) -> tuple[tuple[str, ...], ...]:
        """The spellings in three groups: the first torchrun's, later torchruns', and ours. A prefix of a spelling in an
        earlier group is not made ambiguous by a later group."""
        groups: tuple[list[str], list[str], list[str]] = ([], [], [])
        for spelling, flag in self.by_spelling.items():
            groups[2 if flag.extension else flag.since != FIRST_TORCHRUN].append(spelling)
        return tuple(map(tuple, groups))


OPERATOR_COMMANDS = {
    name: Subcommand(row.module(function), summary)
    for row in FEATURES
    if row.subcommands
    for name, (function, summary) in import_module(row.folder).SUBCOMMANDS.items()
}
"""The subcommands that features bring, for both programs."""

DLROVER_RUN = Program(
    name="dlrover-run",
    launcher="dlrover_run.cli",
    table=TABLE,
    about="""Run SCRIPT once for each worker, restart the workers after failures, and report the cause.

A drop-in for torchrun: every flag of torchrun 2.13 to 2.15 means the same here. Words after SCRIPT are its own.""",
    epilog="\n\n".join(
        (
            "A flag may be written with underscores ([b]--nproc_per_node[/]) or given by a variable "
            "([b]PET_NPROC_PER_NODE=4[/]; not --logs-specs, --numa-binding); the command line takes precedence. "
            "In SCRIPT's arguments [b]${local_rank}[/] is replaced by the local rank of each worker. "
            "[b]PYTHON_EXEC[/] names another interpreter.",
            "One machine: [b]dlrover-run --nproc-per-node=gpu train.py --lr 0.1[/]",
            "Each of two to four: [b]dlrover-run --nnodes=2:4 --rdzv-backend=c10d --rdzv-endpoint=node0 train.py[/]",
            "First of two, by hand: [b]dlrover-run --nnodes=2 --node-rank=0 --master-addr=node0 train.py[/]",
        )
    ),
    subcommands=OPERATOR_COMMANDS,
    unsupported=UNSUPPORTED_DLROVER_FLAGS,
    common=(
        "nproc-per-node",
        "nnodes",
        "rdzv-backend",
        "rdzv-endpoint",
        "rdzv-id",
        "max-restarts",
        "start-method",
        "log-dir",
    ),
)
