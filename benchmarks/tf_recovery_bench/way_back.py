"""The way back after a fault or a change: a session, and its first step. All sums are pure."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from comparison.lost import Late
from launch_bench.case import NANOSECOND, Measured
from launch_bench.room import Report, Room

OF_THE_WORKER = ", of the worker"


def wait_back(room: Room, roles: Sequence[str], began_ns: int, limit: float) -> None:
    """Wait until each role has made a step in a session that began after `began_ns`, or `limit` seconds are over.
    Lost when the job ends before."""
    deadline = time.monotonic() + limit
    with contextlib.suppress(Late):
        for role in roles:
            left = max(0.0, deadline - time.monotonic())
            session = room.wait_each_rank(f"{role}-session", 1, left, began_ns)[0]
            left = max(0.0, deadline - time.monotonic())
            room.wait_each_rank(f"{role}-step", 1, left, session.at_ns)


def first(reports: Sequence[Report], event: str, after_ns: int) -> Report | None:
    """The first report of an event after a moment."""
    return min(
        (report for report in reports if report.event == event and report.at_ns > after_ns),
        key=lambda report: report.at_ns,
        default=None,
    )


def sum_up(reports: Sequence[Report], roles: Sequence[str], began_ns: int, limit: float, planned: bool) -> Measured:
    """How long each role made no step, and how many steps were lost.

    A role's time ends with the first step in its first session after `began_ns`. It begins with the fault, or, where
    the change is `planned`, with the last step before that session. What has not come by the limit takes longer.
    """
    values: dict[str, float] = {}
    unended = set()
    for role in roles:
        part = "" if role == "chief" else OF_THE_WORKER
        session = first(reports, f"{role}-session", began_ns)
        step = first(reports, f"{role}-step", session.at_ns) if session else None
        if session is None or step is None:
            values[part] = limit
            unended.add(part)
            continue
        before = [each.at_ns for each in reports if each.event == f"{role}-step" and each.at_ns < session.at_ns]
        values[part] = (step.at_ns - (max(before, default=began_ns) if planned else began_ns)) * NANOSECOND
    lost = steps_lost(reports, began_ns, planned)
    note = f"no step in {limit:g} s" if "" in unended or lost is None else f"{lost} steps lost"
    return Measured(values, note, frozenset(unended))


def steps_lost(reports: Sequence[Report], began_ns: int, planned: bool) -> int | None:
    """How many steps of the model there were that nobody has after the chief's next session; None when there is none.

    At a fault those count that were done before it, in a planned change those before that session too.
    """
    session = first(reports, "chief-session", began_ns)
    if session is None:
        return None
    until = session.at_ns if planned else began_ns
    # A new worker may be through with a step before the chief that let it in has told of its session.
    old = {report.pid for report in reports if report.at_ns <= began_ns}
    steps = [report for report in reports if report.event.endswith("-step")]
    done = (report.attempt for report in steps if report.pid in old and report.at_ns <= until)
    again = (report.attempt for report in steps if report.pid not in old or report.at_ns > session.at_ns)
    first_again = min(again, default=None)
    return None if first_again is None else max(0, max(done, default=0) - (first_again - 1))
