"""A worker is killed again and again: how much of the time goes into steps that count in the end."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from comparison.lost import Lost
from launch_bench.case import NANOSECOND, Limits, Measured
from launch_bench.processes import of_run
from launch_bench.rivals import TORCHRUN_UNSHARED, Rival
from launch_bench.room import Report, Room

from recovery_bench.deaths import begin, pair
from recovery_bench.fault import Fault
from recovery_bench.rivals import EVERYONE
from recovery_bench.steps import effective_share, rate, read_steps

MAX_RESTARTS = 1000
"""More than there can be; what is compared is the time, and not how soon somebody gives up."""

SEED = 6
"""The same workers are drawn for every rival."""


@dataclass(frozen=True)
class Storm:
    """When workers are killed: `kills` times, one every `interval` seconds, of which the first comes after
    `undisturbed` seconds that say how fast the job is. The time counts from the first kill to an interval after the
    last."""

    kills: int
    interval: float
    undisturbed: float


STORM = Storm(kills=10, interval=30.0, undisturbed=10.0)
QUICK_STORM = Storm(kills=2, interval=10.0, undisturbed=3.0)


def victim(reports: Sequence[Report], alive: Collection[int], rank: int) -> int | None:
    """The process id of the newest worker with that rank, else of the other one, None when both have ended."""
    newest = {report.rank: report.pid for report in reports if report.event == "started"}
    return next((newest[each] for each in (rank, 1 - rank) if newest.get(each) in alive), None)


def kill_one(room: Room, rank: int) -> int | None:
    """Kill the worker with that rank, or the other one where it has none now; when, or None if nobody was there."""
    # The id of a worker that has ended may be somebody else's by now.
    alive = {process.pid for process in of_run([launcher.pid for launcher in room.launchers], str(room.directory))}
    pid = victim(room.reports, alive, rank)
    with contextlib.suppress(Lost):
        return None if pid is None else room.kill(pid)
    return None


def survive(storm: Storm) -> Callable[[Rival, Room, Limits], Measured]:
    """The measurement of a storm of kills."""

    def measure(rival: Rival, room: Room, limits: Limits) -> Measured:
        begin(rival, room, replace(pair("2"), max_restarts=MAX_RESTARTS), limits)
        calm = time.monotonic_ns()
        room.settle(storm.undisturbed)
        began = time.monotonic_ns()
        undisturbed = rate(read_steps(room.directory), calm, began)
        if not undisturbed:
            raise Lost(f"no two steps in {storm.undisturbed:g} s before the first kill")
        draw = random.Random(SEED)
        kills: list[int] = []
        note = ""
        for number in range(1, storm.kills + 1):
            killed = kill_one(room, draw.randrange(2))
            kills += [] if killed is None else [killed]
            over = began + int(number * storm.interval / NANOSECOND)
            try:
                room.settle((over - time.monotonic_ns()) * NANOSECOND)
            except Lost:
                note = f"job lost after kill {len(kills)}"
                break
            idle = (over - read_steps(room.directory)[-1].at_ns) * NANOSECOND
            if idle > limits.recovery:
                note = f"cut off: no step since kill {len(kills)} for {idle:.0f} s"
                break
        # One that was cut off is counted with what it had, over the whole time.
        ended = began + int(storm.kills * storm.interval / NANOSECOND)
        share = effective_share(read_steps(room.directory), kills, began, ended, undisturbed)
        return Measured({"": share}, note or f"{len(kills)} kills, {undisturbed:.1f} steps/s undisturbed")

    return measure


def ettr(storm: Storm) -> Fault:
    """The case, with a storm of one's own."""
    return Fault(
        name="ettr",
        title=f"share of effective training time (ETTR), a worker killed every {storm.interval:g} s "
        f"for {storm.kills * storm.interval:g} s",
        unit="%",
        rivals=EVERYONE,
        baseline=TORCHRUN_UNSHARED.name,
        measure=survive(storm),
        most=1,
    )
