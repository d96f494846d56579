"""The parser: splits a command line into flags, script and the script's own arguments, by torchrun's rules.

Those are argparse's rules: both spellings, `--flag=value`, glued `-r3`, the last of a repeated flag wins, and a prefix
is accepted if exactly one spelling begins with it. argparse itself cannot be used (tried with 3.11):

- It looks for flags behind the script too: `train.py --max 3` is refused as ambiguous, and `train.py -- a` loses `--`.
- Each new flag makes abbreviations ambiguous that torchrun's users type (`--sh`, `--log-`), and a prefix of both
  spellings of one flag is refused. The method that could be overridden is private and changed its result in 3.12.
- An optional value (`--network-check`) takes the next word, which is the script.

The rest of the work, help and completion, is typer's (`application.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from dlrover_run.command_line import values
from dlrover_run.command_line.options import FIRST_TORCHRUN, TABLE, UNSUPPORTED_DLROVER_FLAGS, Flag
from dlrover_run.command_line.suggestions import closest
from dlrover_run.spec import FlagValue, SpecError


class UsageError(SpecError):
    """The command line cannot be split into flags; the message is followed by a pointer to the help."""


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
    above them. `subcommands` are described in `application.py`. `unsupported` says what to do instead of a flag that
    users bring from `unsupported_from`, by the name without dashes. `ignored_keys` are the keys of `--rdzv-conf` that
    have no effect. `common` are the flags, by their names, that the short help shows.
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
        """The variable that the shell's completion script sets when it asks for candidates."""
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
    name: Subcommand(f"dlrover_run.features.operate.commands:{name}", summary)
    for name, summary in (
        ("jobs", "List the jobs on this machine: yours, and for root those of all users."),
        ("status", "Show the state of a running job and of each of its nodes."),
        (
            "top",
            "Show the status of a job until it ends or you press q: each second on a terminal, else after each change.",
        ),
        ("why", "Say why a job is in its state: why it waits, failed, was restarted, is slow, or was slow to start."),
        ("events", "List what happened in a job, from its event logs, also after its end."),
        ("stacks", "Show what all workers of a job do now: the calls of their main threads, equal ones once."),
        ("logs", "Print the latest output of the workers of a job, from any of its nodes."),
        ("drain", "Ask one node to leave the job: its workers get the time to save, and a spare takes its place."),
        ("stop", "Stop a job on all of its nodes. The workers get SIGTERM and the time of [b]--shutdown-timeout[/]."),
    )
}
"""The subcommands for operators, which both programs have."""

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
    subcommands={
        **OPERATOR_COMMANDS,
        "scale": Subcommand(
            "dlrover_run.features.operate.scale:scale", "Change how many nodes of a running job train."
        ),
    },
    unsupported=UNSUPPORTED_DLROVER_FLAGS,
    common=(
        "nproc-per-node",
        "nnodes",
        "rdzv-backend",
        "rdzv-endpoint",
        "rdzv-id",
        "max-restarts",
        "network-check",
        "start-method",
        "log-dir",
    ),
)


class CommandLine(NamedTuple):
    """A parsed command line.

    `values` holds every text that was given for a flag, in order, by `Flag.dest`: an empty text for a switch, and
    `Flag.const` for a flag without its optional value. `request` is the flag that asks for help, the version or
    completion, with `request_value`, or for a flag that takes no value its spelling: the words after it are not parsed.
    """

    values: dict[str, list[str]]
    script: str | None = None
    script_args: tuple[str, ...] = ()
    request: Flag | None = None
    request_value: str = ""


class _Match(NamedTuple):
    spelling: str
    attached: str | None


_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


def parse_argv(argv: Sequence[str], program: Program = DLROVER_RUN) -> CommandLine:
    """Parse a command line. Raises UsageError when a flag is unknown, ambiguous or lacks its value."""
    by_spelling = program.by_spelling
    line = CommandLine({})
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        # The first `--` only ends the flags. Words after the script belong to the script, a further `--` included.
        if word == "--":
            return _with_script(line, argv[position:])
        if not _is_flag(word, program):
            return _with_script(line, argv[position - 1 :])
        match = _resolve(word, program)
        flag = by_spelling[match.spelling]
        # `-mr3` is `-m -r3`: characters that are glued to a one-letter switch are further one-letter flags.
        while not flag.value and match.attached is not None:
            further = _Match("-" + match.attached[:1], match.attached[1:] or None)
            if match.spelling.startswith("--") or further.spelling not in by_spelling:
                raise UsageError(f"{match.spelling} takes no value: remove the value from {word!r}.")
            line.values.setdefault(flag.dest, []).append("")
            match, flag = further, by_spelling[further.spelling]
        text = match.attached
        if text is None and flag.const:
            # No script follows a request, so the next word is its value.
            following = argv[position : position + 1] if flag.request else ()
            text = following[0] if following and not _is_flag(following[0], program) else flag.const
        elif text is None and flag.value:
            if position == len(argv):
                raise UsageError(f"{match.spelling} needs a value: {flag.value}.")
            text = argv[position]
            position += 1
            if text == "--" or _is_flag(text, program):
                remedy = f"write {match.spelling}={text} if you mean this value"
                raise UsageError(f"{match.spelling} needs a value ({flag.value}), and {text!r} is a flag: {remedy}.")
        if flag.request:
            return line._replace(request=flag, request_value=text or (match.spelling if not flag.value else ""))
        line.values.setdefault(flag.dest, []).append(text or "")
    return line


def _with_script(line: CommandLine, words: Sequence[str]) -> CommandLine:
    return line._replace(script=words[0], script_args=tuple(words[1:])) if words else line


def _is_flag(word: str, program: Program) -> bool:
    """Whether a word is a flag, a misspelt one included, and not a script or a value.

    Like argparse this takes a lone dash, a negative number and an unknown word with a space in it as plain words.
    """
    if len(word) < 2 or not word.startswith("-"):
        return False
    return bool(_matches(word, program)) or not (_NEGATIVE_NUMBER.fullmatch(word) or " " in word)


def _matches(word: str, program: Program) -> list[_Match]:
    """The spellings that a word may stand for: several if it is ambiguous."""
    by_spelling = program.by_spelling
    if word in by_spelling:
        return [_Match(word, None)]
    head, equals, tail = word.partition("=")
    attached = tail if equals else None
    if head in by_spelling:
        return [_Match(head, attached)]
    if not word.startswith("--"):
        return [_Match(word[:2], word[2:])] if word[:2] in by_spelling else []
    for spellings in program.spellings:
        if found := [_Match(spelling, attached) for spelling in spellings if spelling.startswith(head)]:
            return found
    return []


def _resolve(word: str, program: Program) -> _Match:
    matches = _matches(word, program)
    flags = list(dict.fromkeys(program.by_spelling[match.spelling] for match in matches))
    # torchrun refuses a prefix of two spellings of one of its flags, so only flags of ours may have one.
    if len(matches) == 1 or (len(flags) == 1 and flags[0].extension):
        return matches[0]
    head = word.partition("=")[0]
    if matches:
        names = [flag.spellings[0] for flag in flags] if len(flags) > 1 else [match.spelling for match in matches]
        raise UsageError(f"{head} is ambiguous: give {values.alternatives(names)}.")
    if instead := program.unsupported.get(head.removeprefix("--").replace("_", "-")):
        raise UsageError(f"{head} of {program.unsupported_from} is not supported by {program.name}: {instead}.")
    close = closest(head, program.by_spelling)
    hint = f"; did you mean {close}?" if close else "."
    raise UsageError(f"{head} is not a flag of {program.name}{hint}")


class FlagValues:
    """The value of each flag, by `Flag.dest`: from the command line, else from its variable, else its default."""

    def __init__(self, line: CommandLine, environ: Mapping[str, str], program: Program = DLROVER_RUN) -> None:
        self._line = line
        self._environ = environ
        self._flags = program.by_dest

    def all(self, dest: str) -> list[FlagValue]:
        """Every text that was given for a flag, in order."""
        flag = self._flags[dest]
        if dest in self._line.values:
            return [FlagValue(flag.spellings[0], text) for text in self._line.values[dest]]
        if flag.variable is not None and flag.variable in self._environ:
            return [FlagValue(flag.variable, self._environ[flag.variable])]
        return []

    def explicit(self, dest: str) -> FlagValue | None:
        """The last text that was given for a flag; None if the flag has only its default."""
        given = self.all(dest)
        return given[-1] if given else None

    def get(self, dest: str) -> FlagValue:
        """The last text that was given for a flag, else its default."""
        flag = self._flags[dest]
        return self.explicit(dest) or FlagValue(flag.spellings[0], flag.default or "")

    def is_on(self, dest: str) -> bool:
        if dest in self._line.values:
            return True
        given = self.explicit(dest)
        return given is not None and values.switch(*given)

    def explicit_integer(self, dest: str, lowest: int, highest: int | None = None) -> int | None:
        """An integer that was given for a flag; None if the flag has only its default."""
        given = self.explicit(dest)
        return None if given is None else values.integer(*given, lowest, highest)

    def integer(self, dest: str, lowest: int, highest: int | None = None) -> int:
        """An integer, the default included."""
        return values.integer(*self.get(dest), lowest, highest)

    def choice(self, dest: str) -> str:
        """One of the words that the flag's `choices` allow, the default included."""
        return values.choice(*self.get(dest), self._flags[dest].choices)
