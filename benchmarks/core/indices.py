"""Which samples a job has trained on in the end, over all changes of its size. Pure.

A restore undoes the steps after the checkpoint. What is left must be whole epochs: each sample once in each of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec


class Line(msgspec.Struct, frozen=True):
    """What one rank notes: that it has `resumed` at that step, or that it begins a `step` with its share of samples.
    `port` is that of the store of its round, and `at` seconds of the monotonic clock."""

    what: Literal["resumed", "step"]
    at: float
    port: int
    rank: int
    step: int
    epoch: int = 0
    samples: tuple[int, ...] = ()


@dataclass(frozen=True)
class Use:
    """`rounds` have trained, and `repeated` steps, which all ranks had begun, were made again after a restore. `wrong`
    epochs lack a sample or have used one twice, and `epochs` is how many there were."""

    rounds: int
    repeated: int
    epochs: int
    wrong: int


def read(texts: Iterable[bytes]) -> list[Line]:
    """The lines of all ranks in the order of time. A line that a kill has cut short is left out."""
    lines = [line for text in texts for line in text.rpartition(b"\n")[0].splitlines()]
    return sorted((msgspec.json.decode(line, type=Line) for line in lines), key=lambda line: line.at)


def use_of(lines: Sequence[Line], size: int) -> Use:
    """How the samples of a data set of that size were used."""
    starts: dict[int, int] = {}
    ranks: dict[int, set[int]] = defaultdict(set)
    shares: dict[int, dict[int, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if line.what == "resumed":
            starts.setdefault(line.port, line.step)
            ranks[line.port].add(line.rank)
        else:
            shares[line.port][line.step].append(line)
    keep = max((line.step for line in lines if line.what == "step"), default=-1) + 1
    used: dict[int, Counter[int]] = defaultdict(Counter)
    repeated = 0
    for port, start in reversed(starts.items()):
        for step, own in shares[port].items():
            if step >= keep:
                # A step that has not begun on all ranks is complete on none.
                repeated += {line.rank for line in own} == ranks[port]
                continue
            for line in own:
                used[line.epoch].update(line.samples)
        keep = min(keep, start)
    whole = Counter(range(size))
    return Use(len(starts), repeated, len(used), sum(found != whole for found in used.values()))
