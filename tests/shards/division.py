"""Divides tests into shards of about the same duration, by the seconds that each took before."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SECONDS = Path(__file__).with_name("seconds.json")
"""Seconds of one test, by its name without parameters. `python -m shards table` writes this file anew."""

DEFAULT = 10.0
"""Estimated seconds of a test in whose file no test has a known duration."""

MAX_CHUNK = 120.0
"""Maximum seconds of neighbours that stay in one shard. Tests of one file share what the file sets up."""

WORKERS = 2
"""Number of tests that run at a time, but for those marked `alone`."""


@dataclass(frozen=True)
class LongTest:
    """A test, by its node id, and whether it needs the machine for itself."""

    id: str
    alone: bool = False

    @property
    def file(self) -> str:
        return self.id.partition("::")[0]

    @property
    def name(self) -> str:
        """The id without parameters."""
        return self.id.partition("[")[0]


def known_seconds(path: Path = SECONDS) -> dict[str, float]:
    """Return the recorded seconds of one test by its name."""
    table: dict[str, float] = json.loads(path.read_text())
    return table


def estimate(tests: Iterable[LongTest], known: Mapping[str, float]) -> dict[str, float]:
    """Return seconds by node id: those of the test, or the mean of its file, or `DEFAULT`."""
    files: dict[str, list[float]] = {}
    for name, seconds in known.items():
        files.setdefault(name.partition("::")[0], []).append(seconds)
    means = {file: sum(values) / len(values) for file, values in files.items()}
    return {test.id: known.get(test.name, means.get(test.file, DEFAULT)) for test in tests}


def expected_seconds(tests: Sequence[LongTest], known: Mapping[str, float]) -> float:
    """Return how long these tests take, those that share the machine `WORKERS` at a time."""
    seconds = estimate(tests, known)
    return sum(seconds[test.id] / (1 if test.alone else WORKERS) for test in tests)


@dataclass
class _Chunk:
    """Neighbours of one file that stay together; `weight` is what they add to the duration of a shard."""

    tests: list[LongTest]
    weight: float = 0.0


def _chunks(tests: Sequence[LongTest], seconds: Mapping[str, float]) -> list[_Chunk]:
    found: list[_Chunk] = []
    for test in tests:
        weight = seconds[test.id] / (1 if test.alone else WORKERS)
        last = found[-1] if found else None
        if (
            last is None
            or last.tests[0].file != test.file
            or last.tests[0].alone != test.alone
            or last.weight + weight > MAX_CHUNK / WORKERS
        ):
            found.append(_Chunk([test], weight))
        else:
            last.tests.append(test)
            last.weight += weight
    return found


def divide(tests: Iterable[LongTest], known: Mapping[str, float], count: int) -> list[list[LongTest]]:
    """Divide tests into `count` shards, each test into exactly one. The order of the tests has no influence: the
    heaviest chunk of neighbours goes first, each to the shard that has least."""
    ordered = sorted(tests, key=lambda test: (test.file, test.alone, test.id))
    chunks = _chunks(ordered, estimate(ordered, known))
    shards: list[list[LongTest]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for chunk in sorted(chunks, key=lambda chunk: (-chunk.weight, chunk.tests[0].id)):
        least = loads.index(min(loads))
        shards[least] += chunk.tests
        loads[least] += chunk.weight
    return [sorted(shard, key=lambda test: (test.file, test.alone, test.id)) for shard in shards]
