"""Which worker another one waited for in vain: the one that gave up has failed, and yet is not the one to look at.

A process group with a time-out raises it in the worker that waits. What is known of the others is what the kernel says
of them at that moment, and no more is said than that shows: one that is late and one that waits as well may look alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlrover_run.failures.causes import COLLECTIVE_TIMEOUT, own_message
from dlrover_run.failures.worker_exit import WorkerExit

MAX_NAMED = 3
"""Workers that the clause names."""

_BARRIER = re.compile(r"(?:\[Rank (\d+)\]: *)?Ranks? (\d+(?:, ?\d+)*) failed to pass monitoredBarrier", re.IGNORECASE)

# Where no process group waits: those sleep on a futex, poll a descriptor, spin, or look again after a short sleep.
_ELSEWHERE = re.compile(r"pipe|\bdo_wait|wait4|sk_wait|wait_woken|unix_stream|io_schedule|folio|nfs|fuse")


@dataclass(frozen=True)
class LiveWorker:
    """A worker that ran when another one of its round failed, as the kernel had it then: `state` is the letter in
    /proc/PID/stat, `wchan` the function of the kernel in which it slept, empty where that is not known."""

    rank: int
    pid: int
    state: str
    wchan: str = ""


def inspect_worker(rank: int, pid: int, proc: Path = Path("/proc")) -> LiveWorker | None:
    """What the kernel says of a worker now; None when it has just ended."""
    try:
        state = (proc / str(pid) / "stat").read_text().rpartition(") ")[2][:1]
        wchan = (proc / str(pid) / "wchan").read_text().strip()
    except OSError:
        return None
    return None if state in "ZX" else LiveWorker(rank, pid, state, "" if wchan == "0" else wchan)


def find_absent_workers(end: WorkerExit, live: Sequence[LiveWorker], *, all_here: bool) -> str | None:
    """A clause on the workers that this one waited for when it gave up, None where it did not, or it is not known.

    `live` are those that ran then and have not failed of themselves since; `all_here` says that the round has no worker
    elsewhere. The worker's own words may name them. Else the only other worker is meant, or those that certainly did
    something else.
    """
    words = own_message(end)
    if not end.failed or not COLLECTIVE_TIMEOUT.search(words):
        return None
    if named := _BARRIER.search(words):
        absent = _named(named[1], named[2], end.rank, live)
    elif all_here and len(live) == 1:
        absent = [_called(live[0])]
    else:
        absent = [_called(one) for one in live if _was_elsewhere(one)]
    more = len(absent) - MAX_NAMED
    return " and for ".join([*absent[:MAX_NAMED], *([f"{more} more"] if more > 0 else [])]) or None


def _named(own: str | None, ranks: str, rank: int, live: Sequence[LiveWorker]) -> list[str]:
    """Those that a barrier names, by their ranks in its group: which are their ranks in the job for all that is known
    where the one that speaks has the same rank in both."""
    numbers = [int(number) for number in ranks.split(",")]
    if own is None or int(own) != rank:
        return [f"rank {number} of the process group" for number in numbers]
    known = {one.rank: one for one in live}
    return [_called(known[number]) if number in known else f"rank {number}" for number in numbers]


def _was_elsewhere(one: LiveWorker) -> bool:
    return one.state in "TtD" or (one.state == "S" and _ELSEWHERE.search(one.wchan) is not None)


def _called(one: LiveWorker) -> str:
    slept = f" (in {one.wchan})" if one.wchan else ""
    doing = {
        "T": "was stopped (by SIGSTOP or the like)",
        "t": "was stopped by a debugger",
        "D": f"waited for a disk or a device{slept}",
        "S": f"slept{slept}",
        "R": "was running",
    }.get(one.state, "was alive")
    return f"rank {one.rank} (pid {one.pid}), which {doing}"
