"""From a kill to the next step: the phases of the slowest rank. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from core.run import NANOSECOND, Report, all_ranks

PHASES = ("started", "imported", "device", "communicator", "step")
"""The reports of a worker, in order: its first line, torch imported, a product computed on its device, an operation of
all ranks done, its first step."""

TITLES = ("start", "import", "device", "communicator", "first step")


@dataclass(frozen=True)
class Recovery:
    """The seconds from a kill to the first step of the last rank, and those of each phase; a phase that no new process
    had takes none."""

    total: float
    phases: Sequence[float]


def recovery_of(reports: Sequence[Report], killed_ns: int, ranks: int, old: Collection[int] = ()) -> Recovery | None:
    """The recovery after a kill; None if not all ranks have made a step. A phase ends when the last process of the
    round that made the step has ended it. `old` are the processes of before that have outlived the kill: the first
    phases are those of the others."""
    steps = all_ranks(reports, PHASES[-1], ranks, killed_ns)
    if steps is None:
        return None
    pids = {report.pid for report in steps}
    ends = [killed_ns]
    for number, phase in enumerate(PHASES):
        # What has survived imports nothing, but takes part in the communicator and the step.
        whose = pids if number >= PHASES.index("communicator") else pids - set(old)
        moments = [one.at_ns for one in reports if one.event == phase and one.pid in whose and one.at_ns > killed_ns]
        ends.append(max([*moments, ends[-1]]))
    seconds = [(later - earlier) * NANOSECOND for earlier, later in itertools.pairwise(ends)]
    return Recovery((ends[-1] - killed_ns) * NANOSECOND, seconds)
