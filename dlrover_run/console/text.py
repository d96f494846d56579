"""Text for the console: times, ranks, colors, widths, and control characters taken out of untrusted text."""

from __future__ import annotations

import time
from collections.abc import Mapping

from dlrover_run.failures.tracebacks import plain_lines

BOLD, RED, YELLOW = "\x1b[1m", "\x1b[1;31m", "\x1b[33m"
_RESET = "\x1b[0m"


def use_color(terminal: bool, environ: Mapping[str, str]) -> bool:
    """Whether to write color; `terminal` is whether the output is a terminal.

    A non-empty NO_COLOR or FORCE_COLOR decides (no-color.org, force-color.org); NO_COLOR has precedence.
    """
    if environ.get("NO_COLOR"):
        return False
    return bool(environ.get("FORCE_COLOR")) or (terminal and environ.get("TERM", "") not in ("", "dumb"))


def colored(text: str, color: str) -> str:
    """The text with the escape sequence `color` around each line, unchanged when `color` is empty."""
    return "\n".join(f"{color}{line}{_RESET}" if line else line for line in text.split("\n")) if color else text


def node_prefix(name: str) -> str:
    """The prefix of each line of the node `name` on a console that several nodes share; empty without a name."""
    return f"[{name}] " if name else ""


def prefix_with_node(text: str, name: str) -> str:
    """The text with `node_prefix(name)` before each line."""
    prefix = node_prefix(name)
    return prefix + text.replace("\n", f"\n{prefix}") if prefix else text


def format_time_of_day(unix_time: float) -> str:
    """The local time of day, such as `04:12:07`."""
    return time.strftime("%H:%M:%S", time.localtime(unix_time))


def format_duration(seconds: float) -> str:
    """A duration: `0.4 s`, `12 s`, `3 min 5 s`, `2 h 3 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def sanitize(text: str) -> str:
    """Text from another node or a master without terminal control sequences: the sender is not trusted."""
    return "\n".join(plain_lines(text))


def display_width(text: str) -> int:
    """The maximum number of terminal columns of a line. East Asian characters take two. Combining characters, which
    take none, are counted as one: a line must not turn out longer than computed."""
    return len(text) if text.isascii() else sum(map(_character_width, text))


def truncate(text: str, columns: int) -> str:
    """The longest beginning of a line that fits into `columns` columns."""
    if text.isascii():
        return text[: max(0, columns)]
    for end, character in enumerate(text):
        columns -= _character_width(character)
        if columns < 0:
            return text[:end]
    return text


def _character_width(character: str) -> int:
    # Imported here because hardly any launch needs it.
    import unicodedata

    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1
