"""The way back after a fault: the old world ends, a new one is there, and it does its first step."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence

from comparison.lost import Late
from launch_bench.case import NANOSECOND, Measured
from launch_bench.room import Report, Room, each_rank

OLD_ENDED = ", to the end of the old workers"
NEW_WORLD = ", to the new world"


def step(world: int) -> str:
    """What a worker reports when the first step of a world of that size is done."""
    return f"step-of-{world}"


def time_recovery(room: Room, began_ns: int, world: int, survivors: Collection[int], limit: float) -> Measured:
    """From `began_ns` to the first step of all ranks of a new world, which has `world` workers, and to what comes
    before it. `survivors` are the process ids of the old workers that the fault spares; the room watches them.

    What is not there after `limit` seconds takes longer. Lost when the job ends.
    """
    with contextlib.suppress(Late):
        room.wait_each_rank(step(world), world, limit, began_ns)
    return sum_up(room.reports, room.ends, began_ns, world, survivors, limit)


def sum_up(
    reports: Sequence[Report],
    ends: Mapping[int, int],
    began_ns: int,
    world: int,
    survivors: Collection[int],
    limit: float,
) -> Measured:
    """The parts of a recovery out of what workers reported and of when the old ones ended.

    The fault counts as noticed when the first worker has ended that it had spared: whether the launcher ended it, or it
    gave up because it missed its peers, nobody trains in the old world any more. The new world is there when the last
    rank is through `init_process_group`. Where a world came to be and failed, the one counts that did the step.
    """
    steps = each_rank(reports, step(world), world, began_ns)
    worlds = [report for report in reports if report.event == f"world-of-{world}" and report.at_ns > began_ns]
    if steps is not None:
        stepped = {report.pid for report in steps}
        worlds = [report for report in worlds if report.pid in stepped]
    ended = [ends[pid] for pid in survivors if pid in ends]
    there = each_rank(worlds, f"world-of-{world}", world, began_ns)
    moments = {
        OLD_ENDED: min(ended, default=None),
        NEW_WORLD: max((report.at_ns for report in there), default=None) if there else None,
        "": max(report.at_ns for report in steps) if steps else None,
    }
    values = {part: limit if at is None else (at - began_ns) * NANOSECOND for part, at in moments.items()}
    unended = frozenset(part for part, at in moments.items() if at is None)
    return Measured(values, f"no step in {limit:g} s" if steps is None else "", unended)
