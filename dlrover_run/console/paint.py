"""Colour on a terminal: when there is any, and what stands before and after a painted text."""

from __future__ import annotations

from collections.abc import Mapping

BOLD, RED, YELLOW = "\x1b[1m", "\x1b[1;31m", "\x1b[33m"
_PLAIN = "\x1b[0m"


def wants_color(terminal: bool, environ: Mapping[str, str]) -> bool:
    """Whether to write in colour to what is a `terminal` or not.

    NO_COLOR and FORCE_COLOR count when they are not empty (no-color.org, force-color.org), the first of them more.
    """
    if environ.get("NO_COLOR"):
        return False
    return bool(environ.get("FORCE_COLOR")) or (terminal and environ.get("TERM", "") not in ("", "dumb"))


def painted(text: str, paint: str) -> str:
    """The text in that colour; as it is where `paint` is empty. Each line is painted by itself."""
    return "\n".join(f"{paint}{line}{_PLAIN}" if line else line for line in text.split("\n")) if paint else text
