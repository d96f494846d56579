"""The parser: splits a command line into flags, script and the script's own arguments, by torchrun's rules.

Those are argparse's rules: both spellings, `--flag=value`, glued `-r3`, the last of a repeated flag wins, and a prefix
is accepted if exactly one spelling begins with it. argparse itself cannot be used (tried with 3.11):

- It looks for flags behind the script too: `train.py --max 3` is refused as ambiguous, and `train.py -- a` loses `--`.
- Each new flag makes abbreviations ambiguous that torchrun's users type (`--sh`, `--log-`), and a prefix of both
  spellings of one flag is refused. The method that could be overridden is private and changed its result in 3.12.
- A flag with an optional value takes the next word, which is the script.

The rest of the work, help and completion, is typer's (`help.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from dlrover_run.command_line import values
from dlrover_run.command_line.flag import Flag
from dlrover_run.command_line.program import DLROVER_RUN, Program
from dlrover_run.command_line.suggestions import closest
from dlrover_run.spec import UsageError


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
    """Parse a command line. Raises UsageError when a flag is unknown, ambiguous or lacks its value. Called by the entry
    point of both programs, by `cli.parse` of each, for Python code that has a command line, and by a shell's completion
    for the words before the cursor."""
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
