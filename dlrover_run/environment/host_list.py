"""Lists of hosts as schedulers write them: Slurm's bracket syntax, and files with one host per line."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dlrover_run.environment.records import is_count

MAX_HOSTS = 100_000
"""Hosts of the longest list: more than any scheduler allocates, so that a damaged list costs no memory."""

_TOKEN = re.compile(r"(?P<gap>[,\s]+)|(?P<part>[^\[\],\s]+|\[[^\[\]]*\])|(?P<other>.)")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
_SLOTS = re.compile(r"(?:max[-_])?slots\s*=\s*(\d{1,9})", re.ASCII)


class HostListError(ValueError):
    """A list that is not written as its scheduler writes it; the message is a clause."""


def expand(text: str) -> list[str]:
    """The hosts of a list such as `n[01-03,7],gpu[1-2]-ib[0,2]`, in its order. Raises HostListError.

    It is what `scontrol show hostnames` prints, which is not installed in most containers. Names behind a bracket
    (`n[1-2]x`) are accepted too.
    """
    hosts: list[str] = []
    for entry in _split(text):
        parts = [_alternatives(part) for part in entry]
        if len(hosts) + math.prod(map(len, parts)) > MAX_HOSTS:
            raise HostListError(f"names more than {MAX_HOSTS} hosts")
        hosts.extend(map("".join, itertools.product(*parts)))
    if not hosts:
        raise HostListError("names no host")
    return hosts


def _split(text: str) -> Iterator[list[str]]:
    """The entries between the commas, each as its plain and its bracketed parts."""
    entry: list[str] = []
    for token in _TOKEN.finditer(text):
        if token["other"]:
            raise HostListError(f"has an unexpected {token[0]!r} at character {token.start() + 1}")
        if token["part"]:
            entry.append(token[0])
        elif entry:
            yield entry
            entry = []
    if entry:
        yield entry


def _alternatives(part: str) -> Sequence[str]:
    """The texts that a plain part, or a part in brackets, stands for."""
    if not part.startswith("["):
        return [part]
    texts: list[str] = []
    for item in part[1:-1].split(","):
        found = _RANGE.fullmatch(item)
        if found is None:
            raise HostListError(f"has {item!r} in brackets, which is not a number or a range")
        low, high = found[1], found[2] or found[1]
        count = int(high) - int(low) + 1
        if count < 1:
            raise HostListError(f"has the range {item}, which ends before it begins")
        if count + len(texts) > MAX_HOSTS:
            raise HostListError(f"names more than {MAX_HOSTS} hosts")
        texts.extend(f"{number:0{len(low)}}" for number in range(int(low), int(high) + 1))
    return texts


class Host(NamedTuple):
    """One host of a file and its number of slots, 0 if the file gives none."""

    name: str
    slots: int = 0


def read_hosts(text: str) -> list[Host]:
    """The hosts of a host file, each once and in the order of their first lines. Raises HostListError.

    Accepted are the forms of Open MPI and DeepSpeed (`n1 slots=8`), of MPICH (`n1:8`), of PBS and LSF (a line for each
    slot), an IPv6 address in brackets, and comments behind `#`.
    """
    slots: dict[str, int] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split(maxsplit=1)
        if not words:
            continue
        name, colon, count = words[0].rpartition(":")
        # `fd00::3` is an IPv6 address and has no slots.
        if (":" in name and not name.endswith("]")) or not (colon and is_count(count)):
            name, count = words[0], ""
        if ":" in name and name.startswith("["):
            name = name.removeprefix("[").removesuffix("]")
        if not re.fullmatch(r"[\w.:-]+", name):
            raise HostListError(f"has {words[0]!r} in line {number}, which is not a host")
        given = _SLOTS.search(words[1]) if len(words) > 1 else None
        slots[name] = slots.get(name, 0) + int(given[1] if given else count or 0)
        lines[name] = lines.get(name, 0) + 1
        if len(slots) > MAX_HOSTS:
            raise HostListError(f"names more than {MAX_HOSTS} hosts")
    if not slots:
        raise HostListError("names no host")
    # A line for each slot gives the number of slots, unless every host has one line.
    repeated = max(lines.values()) > 1
    return [Host(name, count or (lines[name] if repeated else 0)) for name, count in slots.items()]


def short(name: str) -> str:
    """A host name without its domain; an IP address unchanged."""
    head = name.partition(".")[0].lower()
    return name.lower() if ":" in name or head.isdigit() else head


def find_host(hosts: Sequence[str], name: str) -> int | None:
    """The position of a host that may be written with or without its domain; None if it is not, or not once, there."""
    exact = [at for at, host in enumerate(hosts) if host.lower() == name.lower()]
    similar = exact or [at for at, host in enumerate(hosts) if short(host) == short(name)]
    return similar[0] if len(similar) == 1 else None
