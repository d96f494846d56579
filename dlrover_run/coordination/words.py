"""How coordination speaks of nodes to people."""

from __future__ import annotations

from collections.abc import Sequence


def names(hosts: Sequence[str]) -> str:
    """At most three hosts by name: `a`, `a and b`, `a, b and 5 others`."""
    shown = list(hosts) if len(hosts) <= 3 else [*hosts[:2], f"{len(hosts) - 2} others"]
    return " and ".join((", ".join(shown[:-1]), shown[-1])) if len(shown) > 1 else "".join(shown)


def counted(number: int, noun: str) -> str:
    """A number of things: `1 node`, `3 nodes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
