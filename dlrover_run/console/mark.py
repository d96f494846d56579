"""Whose lines these are, on a console that several nodes share."""

from __future__ import annotations


def mark_of(name: str) -> str:
    """What stands before each line of the node that is called `name`; nothing where a node has the console to itself,
    and so no name."""
    return f"[{name}] " if name else ""


def marked(text: str, name: str) -> str:
    """A text of one line or more, with the mark of that node before each line."""
    mark = mark_of(name)
    return mark + text.replace("\n", f"\n{mark}") if mark else text
