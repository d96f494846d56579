"""Finding the last traceback in what a worker wrote, and the line of it that says what was raised.

Pure text work: Python's tracebacks, faulthandler's dumps, and torch's habit of putting `[rank0]: ` before each line.
"""

from __future__ import annotations

import re

_RANK_PREFIX = re.compile(r"^\[(?:rank|default)\d*\]: ?")
# What steers a terminal: whole commands in either spelling (ESC [ or one character of C1), then the characters of
# themselves, among them those that turn the direction of what follows.
_CONTROL = re.compile(
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[@-Z\\-_]"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)
_START = "Traceback (most recent call last):"
_FATAL = "Fatal Python error: "
# What Python writes between two tracebacks of one failure.
_LINKS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
# glog lines and the frames of a C++ stack: libraries write them around a failure, and they tell a reader nothing.
_NOISE = re.compile(r"^(?:\[?[WIE]\d{3,4} |frame #\d+: |Exception raised from .* \(most recent call first\):$)")
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:: .*|:)?$")


def plain_lines(text: str) -> list[str]:
    """The lines of `text` as a terminal would have left them: no colours, no control characters, no progress bars.

    The rank that torch writes before each line goes too: the reader is told the rank once.
    """
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        shown = line.rstrip("\r").rpartition("\r")[2]
        lines.append(_RANK_PREFIX.sub("", _CONTROL.sub("", shown)).rstrip())
    return lines


def last_failure(text: str) -> list[str]:
    """The lines of the last traceback in `text`, with those it came from; an empty list when there is none.

    A dump of faulthandler counts as one.
    """
    lines = [line for line in plain_lines(text) if not _NOISE.match(line)]
    starts = [index for index, line in enumerate(lines) if line == _START or line.startswith(_FATAL)]
    if not starts:
        return []
    start = starts[-1]
    for earlier in reversed(starts[:-1]):
        if not any(line in _LINKS for line in lines[earlier:start]):
            break
        start = earlier
    return _stripped(lines[start:])


def last_link(lines: list[str]) -> list[str]:
    """The last traceback alone of a chain that `last_failure` found."""
    starts = [index for index, line in enumerate(lines) if line == _START]
    return lines[starts[-1] :] if starts else lines


def exception_lines(text: str) -> list[str]:
    """The exception that the last traceback in `text` ends with, as `ValueError: x`; a message may have more lines.

    An empty list when there is no traceback, or its end is missing.
    """
    lines = last_link(last_failure(text))
    if not lines or lines[0] != _START:
        return []
    # Frames are indented, so the first line that is not begins the exception.
    end = next((index for index, line in enumerate(lines) if index and line and not line.startswith(" ")), len(lines))
    return lines[end:] if end < len(lines) and _RAISED.match(lines[end]) else []


def _stripped(lines: list[str]) -> list[str]:
    while lines and not lines[-1]:
        lines = lines[:-1]
    return lines
