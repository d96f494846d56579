"""What the workers wrote of their steps, and what it says of a time in which something went wrong."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch_bench.case import NANOSECOND


@dataclass(frozen=True, order=True)
class Step:
    """One step: when it was done, the how manieth of the job it was, and how many the last checkpoint then held."""

    at_ns: int
    count: int
    kept: int


def parse_steps(text: str) -> list[Step]:
    """The steps that one worker wrote. A last line without an end is left out: its worker was killed over it."""
    whole, _, _ = text.rpartition("\n")
    found = []
    for line in whole.splitlines():
        count, kept, at_ns = line.split()
        found.append(Step(int(at_ns), int(count), int(kept)))
    return found


def read_steps(directory: Path) -> list[Step]:
    """The steps of all workers that have led the job, in the order in which they were done."""
    return sorted(step for path in directory.glob("steps-*") for step in parse_steps(path.read_text()))


def longest_pause(steps: Sequence[Step], began_ns: int, ended_ns: int) -> float:
    """The longest time without a step, in seconds, that began or ended between these two moments.

    One that was still going on at `ended_ns` counts as far as it had come.
    """
    before = [step.at_ns for step in steps if step.at_ns <= began_ns]
    between = [step.at_ns for step in steps if began_ns < step.at_ns <= ended_ns]
    moments = [before[-1] if before else began_ns, *between, ended_ns]
    return max(later - earlier for earlier, later in itertools.pairwise(moments)) * NANOSECOND


def rate(steps: Sequence[Step], began_ns: int, ended_ns: int) -> float:
    """Steps a second between these two moments; 0 when there were fewer than two."""
    between = [step for step in steps if began_ns <= step.at_ns <= ended_ns]
    if len(between) < 2:
        return 0.0
    return (len(between) - 1) / ((between[-1].at_ns - between[0].at_ns) * NANOSECOND)


def standing(steps: Sequence[Step], kills: Sequence[int], at_ns: int) -> int:
    """How many steps were done and not thrown away at a moment, given when workers were killed until then.

    While nobody has done a step since the last kill, that is what the checkpoint holds.
    """
    done = [step for step in steps if step.at_ns <= at_ns]
    if not done:
        return 0
    last = done[-1]
    return last.kept if any(last.at_ns < kill <= at_ns for kill in kills) else last.count


def effective_share(
    steps: Sequence[Step], kills: Sequence[int], began_ns: int, ended_ns: int, undisturbed: float
) -> float:
    """The effective training time ratio, in percent: how much of the time between two moments went into steps that
    were not thrown away, each worth what it takes at `undisturbed` steps a second."""
    useful = standing(steps, kills, ended_ns) - standing(steps, kills, began_ns)
    return 100.0 * useful / undisturbed / ((ended_ns - began_ns) * NANOSECOND)
