"""Find the last traceback in a worker's output, and the line of it that names the exception.

Handles Python's tracebacks, faulthandler's dumps, and the `[rank0]: ` that torch puts before each line.
"""

from __future__ import annotations

import re

_RANK_PREFIX = re.compile(r"^\[(?:rank|default)\d*\]: ?")
# Terminal control: whole sequences in either encoding (ESC [ or one C1 character), then single control characters,
# including those that change the direction of the text after them.
_CONTROL = re.compile(
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[@-Z\\-_]"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)
_START = "Traceback (most recent call last):"
_FATAL = "Fatal Python error: "
# The lines that Python writes between chained tracebacks.
_LINKS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
# glog lines and frames of a C++ stack: libraries write them around a failure, and they do not help a user.
_NOISE = re.compile(r"^(?:\[?[WIE]\d{3,4} |frame #\d+: |Exception raised from .* \(most recent call first\):$)")
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:: .*|:)?$")


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
    lines = [line for line in plain_lines(text) if not _NOISE.match(line)]
    starts = [index for index, line in enumerate(lines) if line == _START or line.startswith(_FATAL)]
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


def last_link(lines: list[str]) -> list[str]:
    """Only the last traceback of a chain from `last_failure`."""
    starts = [index for index, line in enumerate(lines) if line == _START]
    return lines[starts[-1] :] if starts else lines


def exception_lines(text: str) -> list[str]:
    """The exception of the last traceback in `text`, such as `ValueError: x`; a message may have more lines.

    An empty list if there is no traceback, or its end is missing.
    """
    lines = last_link(last_failure(text))
    if not lines or lines[0] != _START:
        return []
    # Frames are indented, so the first line that is not indented begins the exception.
    end = next((index for index, line in enumerate(lines) if index and line and not line.startswith(" ")), len(lines))
    return lines[end:] if end < len(lines) and _RAISED.match(lines[end]) else []
