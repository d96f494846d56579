"""Cuts a command line into flags, script and the script's own arguments, by the rules that torchrun's users know.

Those rules are argparse's: both spellings, `--flag=value`, glued `-r3`, the last of a repeated flag wins, and a prefix
does where exactly one spelling begins with it. They are written out here because argparse changes them between Python
versions, because it looks for flags among the script's own arguments too, and because its messages take a page.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from dlrover_run.command_line.flags import either
from dlrover_run.command_line.options import Flag
from dlrover_run.command_line.program import DLROVER_RUN, Program
from dlrover_run.spec import SpecError


class UsageError(SpecError):
    """The command line cannot even be cut into flags; a look at the help is what would do."""


class CommandLine(NamedTuple):
    """A command line in parts.

    `values` holds every text given for a flag, in order, by `Flag.dest`: an empty one for a switch, and what a flag
    stands for that came without the value which it may have.
    `request` is the flag that asks for help, the version or completion, and `requested` the value given with it:
    nothing after it was looked at.
    """

    values: dict[str, list[str]]
    script: str | None = None
    script_args: tuple[str, ...] = ()
    request: Flag | None = None
    requested: str = ""


class _Match(NamedTuple):
    spelling: str
    attached: str | None


_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


def cut(argv: Sequence[str], program: Program = DLROVER_RUN) -> CommandLine:
    """The parts of a command line; UsageError when a flag is unknown, ambiguous or lacks its value."""
    by_spelling = program.by_spelling
    line = CommandLine({})
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        # The first `--` only ends the flags. What follows the script belongs to the script, a further `--` included.
        if word == "--":
            return _with_script(line, argv[position:])
        if not _is_flag(word, program):
            return _with_script(line, argv[position - 1 :])
        match = _resolve(word, program)
        flag = by_spelling[match.spelling]
        # `-mr3` is `-m -r3`: what is glued to a one-letter switch is more one-letter flags.
        while not flag.value and match.attached is not None:
            further = _Match("-" + match.attached[:1], match.attached[1:] or None)
            if match.spelling.startswith("--") or further.spelling not in by_spelling:
                raise UsageError(f"{match.spelling} takes no value, but {word!r} gives it one.")
            line.values.setdefault(flag.dest, []).append("")
            match, flag = further, by_spelling[further.spelling]
        text = match.attached
        if text is None and flag.bare:
            # No script follows a request, so the next word is its value.
            following = argv[position : position + 1] if flag.request else ()
            text = following[0] if following and not _is_flag(following[0], program) else flag.bare
        elif text is None and flag.value:
            if position == len(argv):
                raise UsageError(f"{match.spelling} needs a value: {flag.value}.")
            text = argv[position]
            position += 1
            if text == "--" or _is_flag(text, program):
                advice = f"write {match.spelling}={text} if it is meant"
                raise UsageError(f"{match.spelling} needs a value ({flag.value}), and {text!r} is a flag: {advice}.")
        if flag.request:
            return line._replace(request=flag, requested=text or "")
        line.values.setdefault(flag.dest, []).append(text or "")
    return line


def _with_script(line: CommandLine, words: Sequence[str]) -> CommandLine:
    return line._replace(script=words[0], script_args=tuple(words[1:])) if words else line


def _is_flag(word: str, program: Program) -> bool:
    """Whether a word stands for a flag, a misspelt one included, and not for a script or a value.

    Like argparse this takes a lone dash, a negative number and an unknown word with a space in it as plain words.
    """
    if len(word) < 2 or not word.startswith("-"):
        return False
    return bool(_matches(word, program)) or not (_NEGATIVE_NUMBER.fullmatch(word) or " " in word)


def _matches(word: str, program: Program) -> list[_Match]:
    """The flags that a word may stand for: one when it is clear, several when it is ambiguous."""
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


def _one_of_ours(matches: Sequence[_Match], program: Program) -> bool:
    """Whether it is two spellings of one flag that torchrun, which refuses those, does not have."""
    flags = {program.by_spelling[match.spelling] for match in matches}
    return len(flags) == 1 and all(flag.ours for flag in flags)


def _resolve(word: str, program: Program) -> _Match:
    matches = _matches(word, program)
    if len(matches) == 1 or _one_of_ours(matches, program):
        return matches[0]
    head = word.partition("=")[0]
    if matches:
        flags = dict.fromkeys(program.by_spelling[match.spelling].spellings[0] for match in matches)
        # torchrun refuses a prefix that two spellings of one flag share, so here too.
        names = either(list(flags) if len(flags) > 1 else [match.spelling for match in matches])
        raise UsageError(f"{head} is ambiguous: it may be {names}.")
    if instead := program.instead.get(head.removeprefix("--").replace("_", "-")):
        raise UsageError(f"{head} is a flag of {program.origin} that is not here: {instead}.")
    import difflib

    close = difflib.get_close_matches(head, list(program.by_spelling), n=1)
    hint = f"; did you mean {close[0]}?" if close else "."
    raise UsageError(f"{head} is not a flag of {program.name}{hint}")
