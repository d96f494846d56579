"""How coordination speaks of nodes to people."""

from __future__ import annotations

from collections.abc import Sequence


def join_names(hosts: Sequence[str], number: int | None = None) -> str:
    """At most three hosts by name: `a`, `a and b`, `a, b and 5 others`. `number` says how many there are where only the
    first of them are given."""
    number = len(hosts) if number is None else number
    shown = list(hosts) if number <= 3 else [*hosts[:2], f"{number - 2} others"]
    return " and ".join((", ".join(shown[:-1]), shown[-1])) if len(shown) > 1 else "".join(shown)


def node_name(host: str, rank: int | None = None) -> str:
    """A node for people: `node 2 (gpu09)`, or its host alone while it has no node rank.

    A host with a space is no machine's: nodes that share a machine are called `node 2` by whoever started them. An
    empty host is one that is not known.
    """
    if rank is None or " " in host:
        return host or "a node whose host is unknown"
    return f"node {rank} ({host or 'host unknown'})"


def departure_text(signal: str) -> str:
    """What became of a node that goes before the job is over, because of that signal or an empty string."""
    return f"was ended by {signal}" if signal else "was asked to leave"


def counted(number: int, noun: str) -> str:
    """A number of things: `1 node`, `3 nodes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
