"""What NCCL's RAS threads answer, as a record. Pure; whatever the text is, nothing is raised.

Since 2.28.7 a report is JSON, with what each rank of each communicator has launched, by kind of operation. Before, it
is text for people: only communicators whose ranks differ are described, and of these only the ranks that are few; of
the others there is their number. Formats: NVIDIA's user guide on RAS, and `ras/client_support.cc` of NCCL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

MAX_COMMUNICATORS = 4096
"""Communicators of a report that are read."""

MAX_RANKS = 200_000
"""Ranks of all communicators of a report that are read."""


ALL_KINDS = "collective"
"""What stands in place of a kind of operation in the text of the first versions, which count all of them together."""


class Place(NamedTuple):
    """A process that has a rank: its id, and the address of its node as NCCL prints it."""

    pid: int
    host: str


class Launched(NamedTuple):
    """What is known of one kind of operation in a communicator: the last one of each rank of which this is known, and,
    of the others, how many have launched up to which."""

    by_rank: dict[int, int]
    others: dict[int, int]

    @property
    def highest(self) -> int:
        """The number of the last operation that any rank has launched."""
        return max((*self.by_rank.values(), *self.others), default=0)

    def ahead_of(self, number: int) -> int:
        """The ranks that have launched more."""
        listed = sum(other > number for other in self.by_rank.values())
        return listed + sum(ranks for other, ranks in self.others.items() if other > number)

    @property
    def is_even(self) -> bool:
        """Whether all ranks that are known have launched the same number."""
        return len({*self.by_rank.values(), *self.others}) <= 1


class Communicator(NamedTuple):
    """One communicator. `size` is 0 if unknown. `places` has the ranks whose process is known, and `missing` those of
    which nothing was heard. `launched` is by the names of NCCL, such as `AllReduce`."""

    hash: str
    size: int
    places: dict[int, Place]
    missing: dict[int, Place]
    launched: dict[str, Launched]


def parse_report(text: str) -> tuple[Communicator, ...]:
    """The communicators of a report in either format; of a damaged one those that can be read."""
    start = text.lstrip()[:1]
    return tuple(_of_json(text)) if start == "{" else tuple(_of_text(text))


def _of_json(text: str) -> Iterator[Communicator]:
    try:
        report = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return
    left = MAX_RANKS
    for one in _list(report, "communicators")[:MAX_COMMUNICATORS]:
        ranks, missing = _list(one, "ranks"), _list(one, "missing_ranks")
        left -= len(ranks) + len(missing)
        if left < 0:
            return
        places: dict[int, Place] = {}
        launched: dict[str, dict[int, int]] = {}
        for rank in ranks:
            number, counts = _number(rank, "rank"), rank.get("collective_counts") if isinstance(rank, dict) else None
            if number is None or not isinstance(counts, dict):
                continue
            places[number] = _place(rank)
            for operation in counts:
                if (count := _number(counts, operation)) is not None:
                    launched.setdefault(str(operation), {})[number] = count
        absent = {number: _place(rank) for rank in missing if (number := _number(rank, "rank")) is not None}
        # Of one that is being destroyed the counts are of no use; another hash may be equal by chance.
        name = f"{_text(one, 'hash')}/{_text(one, 'secondary_hash')}"
        kinds = {operation: Launched(by_rank, {}) for operation, by_rank in launched.items()}
        if places or absent:
            yield Communicator(name, _number(one, "size") or 0, places, absent, kinds)


def _list(value: Any, key: str) -> list[Any]:
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, list) else []


def _number(value: Any, key: str) -> int | None:
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, int) and not isinstance(found, bool) and 0 <= found < 2**53 else None


def _text(value: Any, key: str) -> str:
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, str) else ""


def _place(value: Any) -> Place:
    return Place(_number(value, "pid") or 0, _text(value, "host"))


_GROUP = re.compile(r"\s*(\d+)\s+\d+\s+\d+\s+[\d-]+\s+(\d+)\s+\d+\s+[A-Z]+\s+[A-Z,]+\s*\Z")
_HEAD = re.compile(r"#(\d+)-\d+ \(([0-9a-fA-F]+)\) (MISMATCH|INCOMPLETE|ERROR)\s*\Z")
_KIND = re.compile(r"\s+Communicator ranks have different (\w+) operation counts\s*\Z")
_COUNT = r"(?:launched up to operation (\d+)|not launched any operations)"
_MANY = re.compile(rf"\s+(\d+) ranks have {_COUNT}\s*\Z")
_WHERE = r"GPU .* managed by process (\d+) on node (\S+)"
_SINGLE = re.compile(rf"\s+Rank (\d+) has {_COUNT} -- (?:{_WHERE}|\[.*\])\s*\Z")
_LISTED = re.compile(rf"\s+Rank (\d+) -- (?:{_WHERE}|\[.*\])\s*\Z")


class _Reader:
    """Reads the lines of a report in text, one after the other."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.found: dict[str, Communicator] = {}
        self._current: Communicator | None = None
        self._section = ""
        self._kind: Launched | None = None
        self._listed_count: int | None = None

    def take(self, line: str) -> None:
        if match := _GROUP.match(line):
            self.sizes[match[1]] = int(match[2])
        elif match := _HEAD.match(line):
            group, name, self._section = match.groups()
            new = Communicator(name.lower(), self.sizes.get(group, 0), {}, {}, {})
            self._current = self.found.setdefault(name.lower(), new)
            self._kind = self._listed_count = None
        elif self._current is not None:
            self._take_part(self._current, line)

    def _take_part(self, current: Communicator, line: str) -> None:
        if match := _KIND.match(line):
            self._kind, self._listed_count = Launched({}, {}), None
            current.launched[match[1]] = self._kind
        elif "ranks have different status" in line or "ranks have status" in line:
            self._kind = self._listed_count = None
        elif self._kind is not None and (match := _MANY.match(line)):
            self._listed_count = int(match[2] or 0)
            self._kind.others[self._listed_count] = int(match[1])
        elif self._kind is not None and (match := _SINGLE.match(line)):
            self._listed_count = None
            self._kind.by_rank[int(match[1])] = int(match[2] or 0)
            self._note_place(current.places, match[1], match[3], match[4])
        elif match := _LISTED.match(line):
            if self._section == "INCOMPLETE":
                self._note_place(current.missing, match[1], match[2], match[3])
            elif self._kind is not None and self._listed_count is not None:
                self._kind.by_rank[int(match[1])] = self._listed_count
                self._note_place(current.places, match[1], match[2], match[3])
                left = self._kind.others
                left[self._listed_count] = left.get(self._listed_count, 1) - 1
                if left[self._listed_count] <= 0:
                    del left[self._listed_count]

    def _note_place(self, places: dict[int, Place], rank: str, pid: str | None, host: str | None) -> None:
        places[int(rank)] = Place(int(pid or 0), host or "")


def _of_text(text: str) -> Iterator[Communicator]:
    reader = _Reader()
    for line in text.splitlines():
        # A number of thousands of digits is damage.
        if len(line) < 400:
            reader.take(line)
    yield from list(reader.found.values())[:MAX_COMMUNICATORS]
