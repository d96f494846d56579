"""A program with a command line of its own: what it is called, which flags it takes and what its help says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from dlrover_run.command_line.options import FIRST_TORCHRUN, OF_DLROVER, TABLE, Flag


@dataclass(frozen=True)
class Program:
    """One command line.

    `name` is what messages begin with. `about` and `epilog` are the help before and after the flags, which it names
    when `usage` does. `instead` says what to do in the place of flags that people bring from elsewhere, by the name
    without dashes, and `origin` whose those are. `meets` adds the keys of `--rdzv-conf` to the help, but for `no_keys`,
    which have no effect here.
    """

    name: str
    table: tuple[Flag, ...]
    about: str
    epilog: str
    usage: str = "[FLAGS] SCRIPT [ARGS]..."
    instead: Mapping[str, str] = field(default_factory=dict)
    origin: str = "DLRover's"
    meets: bool = True
    no_keys: frozenset[str] = frozenset()

    @property
    def completion_variable(self) -> str:
        """Set by the shell's completion script when it asks what could stand next."""
        return f"_{self.name.split()[0].replace('-', '_').upper()}_COMPLETE"

    @cached_property
    def by_dest(self) -> Mapping[str, Flag]:
        """The flags by the key of their value."""
        return {flag.dest: flag for flag in self.table}

    @cached_property
    def by_spelling(self) -> Mapping[str, Flag]:
        """The flags by each way to write them in full."""
        return {spelling: flag for flag in self.table for spelling in flag.spellings}

    @cached_property
    def spellings(self) -> tuple[tuple[str, ...], ...]:
        """Those of the first torchrun, those that later ones brought, and ours: an abbreviation that begins one of an
        earlier group is not made ambiguous by a later group."""
        groups: tuple[list[str], list[str], list[str]] = ([], [], [])
        for spelling, flag in self.by_spelling.items():
            groups[2 if flag.ours else flag.since != FIRST_TORCHRUN].append(spelling)
        return tuple(map(tuple, groups))


DLROVER_RUN = Program(
    name="dlrover-run",
    table=TABLE,
    about="""Run SCRIPT once for each worker, keep the group together, and say what went wrong.

A drop-in for torchrun: every flag of torchrun 2.13 to 2.15 means the same here. What follows SCRIPT is its own.""",
    epilog="\n\n".join(
        (
            "A flag may be written with underscores ([b]--nproc_per_node[/]) or given by a variable "
            "([b]PET_NPROC_PER_NODE=4[/]; not --logs-specs, --numa-binding); the command line wins. "
            "In SCRIPT's arguments [b]${local_rank}[/] becomes "
            "each worker's local rank. [b]PYTHON_EXEC[/] names another interpreter.",
            "One machine: [b]dlrover-run --nproc-per-node=gpu train.py --lr 0.1[/]",
            "Each of two to four: [b]dlrover-run --nnodes=2:4 --rdzv-backend=c10d --rdzv-endpoint=node0 train.py[/]",
            "First of two, by hand: [b]dlrover-run --nnodes=2 --node-rank=0 --master-addr=node0 train.py[/]",
        )
    ),
    instead=OF_DLROVER,
)
