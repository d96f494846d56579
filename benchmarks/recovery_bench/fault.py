"""What a fault is, and how the rivals take turns at it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from comparison import report
from comparison.ratios import Sample, summarise
from launch import run_once
from launch_bench.case import Case, Limits, R


def _nothing() -> str | None:
    return None


@dataclass(frozen=True)
class Fault(Case[R]):
    """A case in which something breaks. No run is a warm-up: the job has long begun when the clock is started.

    A part that `within` names is compared with another part of the same run. Where the baseline is no rival but a time
    that is known, `yardstick` has it in seconds. A rival takes part in `most` turns at most, or in as many as `few`
    says. `absent` says why nobody can take part here, None when they can.
    """

    within: Mapping[str, str] = field(default_factory=dict)
    yardstick: float = 0.0
    most: int = 5
    few: Mapping[str, int] = field(default_factory=dict)
    absent: Callable[[], str | None] = _nothing

    def turns(self, rival: str, repetitions: int) -> int:
        """How many times a rival runs."""
        return min(repetitions, self.few.get(rival, self.most))


def run_fault(fault: Fault, repetitions: int, limits: Limits, absent: Mapping[str, str]) -> report.Result:
    """Have the rivals take turns at a fault; `absent` says of those that are not installed why."""
    names = [rival.name for rival in fault.rivals]
    if why := fault.absent():
        return report.Result(fault.name, fault.title, fault.unit, fault.baseline, [], dict.fromkeys(names, why))
    samples: list[Sample] = []
    for turn in range(1, repetitions + 1):
        present = [rival for rival in fault.rivals if rival.name not in absent]
        due = [rival for rival in present if turn <= fault.turns(rival.name, repetitions)]
        samples += [run_once(fault, rival, turn, limits) for rival in due]
        if fault.yardstick and turn <= fault.most:
            samples.append(Sample(fault.baseline, turn, {"": fault.yardstick}))
    return result_of(fault, samples, {name: why for name, why in absent.items() if name in names})


def result_of(fault: Fault, samples: Sequence[Sample], absent: Mapping[str, str]) -> report.Result:
    """The sums of one fault."""
    rows = summarise(samples, fault.baseline, fault.targets, fault.within)
    return report.Result(fault.name, fault.title, fault.unit, fault.baseline, rows, dict(absent))
