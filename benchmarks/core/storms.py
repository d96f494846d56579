"""A job whose workers are killed one after the other, and the share of the time in which it trained."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from core.cases import Limits
from core.launchers import Launcher
from core.ratios import Lost, Measured
from core.run import NANOSECOND, Report, Run
from core.steps import Step, effective_share, pauses, read_steps, repeated_steps, step_rate, training_rate
from core.two_nodes import train, two_nodes

STORM_RESTARTS = 1000
"""More than a storm needs: it compares times, not budgets."""

SEED = 6
"""The same workers are drawn for every rival."""


@dataclass(frozen=True)
class Storm:
    """`kills` workers are killed, one every `interval` seconds, the first after `undisturbed` seconds that show how
    fast the job is. The share is that of the time from the first kill to an interval after the last."""

    kills: int = 10
    interval: float = 30.0
    undisturbed: float = 10.0


def victim(reports: Sequence[Report], alive: Collection[int], rank: int) -> int | None:
    """The process id of the newest worker of a rank, or of the other rank, if one is alive."""
    newest = {report.rank: report.pid for report in reports if report.event == "started"}
    return next((newest[each] for each in (rank, 1 - rank) if newest.get(each) in alive), None)


@dataclass(frozen=True)
class Survived:
    """A job in a storm: from when to when it counts, when workers were killed, how many steps a second it did before,
    and what went wrong."""

    began_ns: int
    ended_ns: int
    kills: Sequence[int]
    undisturbed: float
    note: str = ""

    def share(self, steps: Sequence[Step], rate: float) -> float:
        """The effective training time ratio in percent, each step worth the time that it takes at that rate."""
        return effective_share(steps, self.kills, self.began_ns, self.ended_ns, rate)

    def rate(self, steps: Sequence[Step]) -> float:
        """Steps per second of the storm; 0 if it has left none."""
        return training_rate(steps, self.kills, self.began_ns, self.ended_ns)


def survive(storm: Storm, rival: Launcher, run: Run, limits: Limits) -> Survived:
    """Kill workers of a job that trains."""
    train(rival, run, replace(two_nodes("2"), max_restarts=STORM_RESTARTS), limits)
    calm = time.monotonic_ns()
    run.settle(storm.undisturbed)
    began = time.monotonic_ns()
    undisturbed = step_rate(read_steps(run.directory), calm, began)
    if not undisturbed:
        raise Lost(f"no two steps in {storm.undisturbed:g} s before the first kill")
    draw = random.Random(SEED)
    kills: list[int] = []
    note = ""
    for number in range(1, storm.kills + 1):
        # The process id of a worker that has ended may belong to another program now.
        pid = victim(run.reports, {process.pid for process in run.processes()}, draw.randrange(2))
        with contextlib.suppress(Lost):
            kills += [run.kill(pid)] if pid is not None else []
        over = began + int(number * storm.interval / NANOSECOND)
        try:
            run.settle((over - time.monotonic_ns()) * NANOSECOND)
        except Lost:
            note = f"job lost after kill {len(kills)}"
            break
        idle = (over - read_steps(run.directory)[-1].at_ns) * NANOSECOND
        if idle > limits.recovery:
            note = f"cut off: no step since kill {len(kills)} for {idle:.0f} s"
            break
    # A run that was cut off counts with the steps that it had, over the whole time.
    ended = began + int(storm.kills * storm.interval / NANOSECOND)
    return Survived(began, ended, kills, undisturbed, note)


def effective_time(storm: Storm) -> Callable[[Launcher, Run, Limits], Measured]:
    """The effective training time ratio while workers are killed."""

    def measure(rival: Launcher, run: Run, limits: Limits) -> Measured:
        lived = survive(storm, rival, run, limits)
        steps = read_steps(run.directory)
        share = lived.share(steps, lived.undisturbed)
        repeated = repeated_steps(steps, lived.began_ns, lived.ended_ns)
        number = len(lived.kills)
        figures = [f"{number} kills, {lived.undisturbed:.1f} steps/s undisturbed"]
        if own := lived.rate(steps):
            figures.append(f"{lived.share(steps, own):.1f} % at the {own:.1f} steps/s of the storm")
        if number:
            figures.append(f"{repeated / number:.1f} steps repeated per kill")
        if waited := pauses(steps, lived.kills):
            figures.append(f"{statistics.median(waited):.3f} s from a kill to a step")
        return Measured({"": share}, ", ".join([lived.note, *figures] if lived.note else figures))

    return measure
