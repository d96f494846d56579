"""Find the last traceback in a worker's output, and the line of it that names the exception.

Handles Python's tracebacks with groups of exceptions and syntax errors, those that rich draws (typer too) and loguru
writes, in plain text or in log records, faulthandler's dumps, and the `[rank0]: ` that torch puts before each line.
"""

from __future__ import annotations

import re

from dlrover_run.failures.log_records import HEADING as _START
from dlrover_run.failures.log_records import unpack_records

_RANK_PREFIX = re.compile(r"^\[(?:rank|default)\d*\]: ?")
# Terminal control: whole sequences in either encoding (ESC [ or one C1 character), then single control characters,
# including those that change the direction of the text after them.
_CONTROL = re.compile(
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[@-Z\\-_]"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)
_FATAL = "Fatal Python error: "
# The lines that Python writes between chained tracebacks.
_LINKS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
# glog lines and frames of a C++ stack: libraries write them around a failure, and they do not help a user.
_NOISE = re.compile(r"^(?:\[?[WIE]\d{3,4} |frame #\d+: |Exception raised from .* \(most recent call first\):$)")
_RAISED = re.compile(r"^[A-Za-z_][\w.<>]*(?:: .*|:)?$")
_GROUP = "  + Exception Group Traceback (most recent call last):"
# The lines of a group, with the depth at which they stand: the exception's name is not indented after the bar.
_GROUP_RAISED = re.compile(r"^(?P<depth> +)\| (?P<raised>[A-Za-z_][\w.<>]*(?:: .*|:)?)$")
# The edges of rich's boxes, in Unicode or ASCII. A box within another one is indented.
_BOX = re.compile(r"^[\u256d\u250c+][\u2500-]+ Traceback \(most recent call last\) [\u2500-]+[\u256e\u2510+]$")
_BOX_END = re.compile(r"^[\u2570\u2514+][\u2500-]+[\u256f\u2518+]$")
# Python prints no heading for a script that does not compile.
_UNCOMPILED = re.compile(r'^  File ".*", line \d+$')
_SYNTAX = re.compile(r"^(?:SyntaxError|IndentationError|TabError): ")


def plain_lines(text: str) -> list[str]:
    """The lines of `text` as a terminal would show them: no colors, no control characters, no progress bars.

    The rank that torch writes before each line is removed: the report names the rank once.
    """
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        shown = line.rstrip("\r").rpartition("\r")[2]
        lines.append(_RANK_PREFIX.sub("", _CONTROL.sub("", shown)).rstrip())
    return lines


def last_failure(text: str) -> list[str]:
    """The lines of the last traceback in `text` with those it is chained to; an empty list if there is none.

    A dump of faulthandler counts as a traceback.
    """
    lines = [line for line in unpack_records(plain_lines(text)) if not _NOISE.match(line)]
    starts = _starts(lines)
    if not starts:
        return []
    start = starts[-1]
    for earlier in reversed(starts[:-1]):
        if not any(line in _LINKS for line in lines[earlier:start]):
            break
        start = earlier
    found = lines[start:]
    while found and not found[-1]:
        found.pop()
    return found


def _starts(lines: list[str]) -> list[int]:
    """Where tracebacks begin."""
    starts: list[int] = []
    for index, line in enumerate(lines):
        if line in (_START, _GROUP) or line.startswith(_FATAL) or _BOX.match(line):
            starts.append(index)
        elif _SYNTAX.match(line):
            before = index - 1
            while before >= 0 and lines[before].startswith("    "):
                before -= 1
            # Within a traceback the frames of the import stand above.
            if before >= 0 and _UNCOMPILED.match(lines[before]) and (before == 0 or lines[before - 1][:2] != "  "):
                starts.append(before)
    return starts


def last_link(lines: list[str]) -> list[str]:
    """Only the last traceback of a chain from `last_failure`."""
    starts = _starts(lines)
    return lines[starts[-1] :] if starts else lines


def exception_lines(text: str) -> list[str]:
    """The exception of the last traceback in `text`, such as `ValueError: x`; a message may have more lines.

    Of a group of exceptions it is the group with the first one in it, in one line. An empty list if there is no
    traceback, or its end is missing.
    """
    lines = last_link(last_failure(text))
    if not lines or lines[0].startswith(_FATAL):
        return []
    if lines[0] == _GROUP:
        return _group_exception(lines)
    if _BOX.match(lines[0]):
        return _boxed_exception(lines)
    # Frames are indented, so the first line that is not indented begins the exception. loguru marks one of the frames.
    rest = enumerate(lines)
    end = next((at for at, line in rest if at and line and not line.startswith((" ", '> File "'))), len(lines))
    return lines[end:] if end < len(lines) and _RAISED.match(lines[end]) else []


def _group_exception(lines: list[str]) -> list[str]:
    raised = [found for line in lines if (found := _GROUP_RAISED.match(line))]
    # The first one that holds no others; a group of groups is shown by its outermost and its innermost name.
    inner = next(
        (found for found in raised[1:] if not found["raised"].endswith(("sub-exception)", "sub-exceptions)"))), None
    )
    if not raised:
        return []
    return [raised[0]["raised"] if inner is None else f"{raised[0]['raised']}: {inner['raised']}"]


def _boxed_exception(lines: list[str]) -> list[str]:
    """The exception below a box. rich cuts a message at the width of the box, so its lines are joined again."""
    width = len(lines[0])
    end = next((index for index, line in enumerate(lines) if _BOX_END.match(line)), len(lines))
    below = lines[end + 1 :]
    if not below or not _RAISED.match(below[0]):
        return []
    joined = below[:1]
    last = below[0]
    for line in below[1:]:
        if len(last) + 1 + len(line.partition(" ")[0]) > width and line and not line.startswith(" "):
            # A word that is longer than a line is cut itself.
            joined[-1] += line if len(last) == width else f" {line}"
        else:
            joined.append(line)
        last = line
    return joined
