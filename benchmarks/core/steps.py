"""The steps of a training job over time: pauses, rate, and the effective training time ratio. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.run import NANOSECOND


@dataclass(frozen=True, order=True)
class Step:
    """One step: when it was done, its number, and how many steps the last checkpoint held then."""

    at_ns: int
    count: int
    saved: int


def read_steps(directory: Path) -> list[Step]:
    """The steps of all workers that had rank 0, in the order of time.

    A last line without an end is left out: its worker was killed while it wrote.
    """
    lines = [line for path in directory.glob("steps-*") for line in path.read_text().rpartition("\n")[0].splitlines()]
    return sorted(Step(int(at_ns), int(count), int(saved)) for count, saved, at_ns in map(str.split, lines))


def longest_pause(steps: Sequence[Step], began_ns: int, ended_ns: int) -> float:
    """The longest time without a step, in seconds, that lies at least partly between these moments.

    A pause that goes on at `ended_ns` counts up to then.
    """
    before = [step.at_ns for step in steps if step.at_ns <= began_ns]
    between = [step.at_ns for step in steps if began_ns < step.at_ns <= ended_ns]
    moments = [before[-1] if before else began_ns, *between, ended_ns]
    return max(later - earlier for earlier, later in itertools.pairwise(moments)) * NANOSECOND


def step_rate(steps: Sequence[Step], began_ns: int, ended_ns: int) -> float:
    """Steps per second between these moments; 0 if there were fewer than two."""
    between = [step for step in steps if began_ns <= step.at_ns <= ended_ns]
    if len(between) < 2:
        return 0.0
    return (len(between) - 1) / ((between[-1].at_ns - between[0].at_ns) * NANOSECOND)


def training_rate(steps: Sequence[Step], kills: Sequence[int], began_ns: int, ended_ns: int) -> float:
    """Steps per second of the times between these moments in which the job trained: between two steps with no kill
    between them. 0 if there are none."""
    between = [step.at_ns for step in steps if began_ns <= step.at_ns <= ended_ns]
    apart = [
        later - earlier
        for earlier, later in itertools.pairwise(between)
        if not any(earlier < kill <= later for kill in kills)
    ]
    return len(apart) / (sum(apart) * NANOSECOND) if apart else 0.0


def kept_steps(steps: Sequence[Step], kills: Sequence[int], at_ns: int) -> int:
    """How many steps were done and not lost at a moment. After a kill, until the next step, these are the ones in the
    checkpoint."""
    done = [step for step in steps if step.at_ns <= at_ns]
    if not done:
        return 0
    last = done[-1]
    return last.saved if any(last.at_ns < kill <= at_ns for kill in kills) else last.count


def effective_share(
    steps: Sequence[Step], kills: Sequence[int], began_ns: int, ended_ns: int, undisturbed: float
) -> float:
    """The effective training time ratio in percent: the share of the time that went into steps that were not lost, each
    worth the time that it takes at `undisturbed` steps per second."""
    useful = kept_steps(steps, kills, ended_ns) - kept_steps(steps, kills, began_ns)
    return 100.0 * useful / undisturbed / ((ended_ns - began_ns) * NANOSECOND)


def repeated_steps(steps: Sequence[Step], began_ns: int, ended_ns: int) -> int:
    """How many of the steps between these moments had been done before."""
    done: set[int] = set()
    repeated = 0
    for step in steps:
        repeated += began_ns < step.at_ns <= ended_ns and step.count in done
        done.add(step.count)
    return repeated


def pauses(steps: Sequence[Step], kills: Sequence[int]) -> list[float]:
    """The seconds from each kill to the next step; those without one are left out."""
    following = ((kill, next((step.at_ns for step in steps if step.at_ns > kill), None)) for kill in kills)
    return [(at_ns - kill) * NANOSECOND for kill, at_ns in following if at_ns is not None]
