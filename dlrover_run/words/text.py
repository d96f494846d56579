"""Names of nodes, ranks, and numbers of things and bytes, as users read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def join_words(words: Sequence[str], conjunction: str = "and") -> str:
    """All the words in a sentence: `a`, `a and b`, `a, b and c`."""
    return f" {conjunction} ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else "".join(words)


def join_names(hosts: Sequence[str]) -> str:
    """At most three hosts by name: `a`, `a and b`, `a, b and 5 others`."""
    return join_words(hosts if len(hosts) <= 3 else [*hosts[:2], f"{len(hosts) - 2} others"])


def node_name(host: str, rank: int | None = None) -> str:
    """The name of a node: `node 2 (gpu09)`, or its host alone while it has no node rank.

    A host with a space is no machine's: nodes that share a machine are named `node 2` by the launcher that started
    them. An empty host is one that is not known.
    """
    if rank is None or " " in host:
        return host or "a node whose host is unknown"
    return f"node {rank} ({host or 'host unknown'})"


def counted(number: int, noun: str) -> str:
    """A number of things: `1 node`, `3 nodes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_bytes(count: int) -> str:
    """A number of bytes with its unit: `512 MiB`, `1.5 GiB`."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks as ranges: `rank 4`, `ranks 0-2, 5`."""
    numbers = sorted(ranks)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = []
    for run in runs:
        # A run of two reads better as two numbers.
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(parts)}"
