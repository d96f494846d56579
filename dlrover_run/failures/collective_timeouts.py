"""For which workers a collective timed out: the worker that reports the timeout has failed, but is not the cause.

A process group raises its timeout in the worker that waits. Of the other workers only their kernel state at that moment
is known, and the text claims no more than that shows: a worker that is late and one that waits too may look alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dlrover_run.failures import collective_errors
from dlrover_run.failures.causes import own_message
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.observe.processes import read_worker

MAX_NAMED = 3
"""Maximum workers that the clause names."""

_BARRIER = re.compile(r"(?:\[Rank (\d+)\]: *)?Ranks? (\d+(?:, ?\d+)*) failed to pass monitoredBarrier", re.IGNORECASE)

# Kernel functions in which no process group waits: those sleep on a futex, poll a descriptor, spin or nanosleep.
_ELSEWHERE = re.compile(r"pipe|\bdo_wait|wait4|sk_wait|wait_woken|unix_stream|io_schedule|folio|nfs|fuse")


class LiveWorker(msgspec.Struct, frozen=True):
    """A worker that was alive when another one of its round failed, and its kernel state then: `state` is the letter in
    /proc/PID/stat, `wchan` the kernel function in which it slept, empty if unknown."""

    rank: int
    pid: int
    state: str
    wchan: str = ""


def inspect_worker(rank: int, pid: int, proc: Path = Path("/proc")) -> LiveWorker | None:
    """The kernel state of a worker now; None if it has just ended."""
    figures = read_worker(pid, proc)
    return None if figures is None else LiveWorker(rank, pid, figures.own.state, figures.wchan)


def find_absent_workers(end: WorkerExit, live: Sequence[LiveWorker], *, all_here: bool) -> str | None:
    """A clause on the workers for which this worker's collective timed out; None if none did or they are not known.

    `live` are the workers that were alive then and have not failed by themselves since; `all_here`: the round has no
    worker on another node. The message of a barrier names them. Otherwise it is the only other worker, or the workers
    that were certainly not waiting in a collective.
    """
    message = own_message(end)
    if not end.failed or not collective_errors.TIMEOUT.search(message):
        return None
    if named := _BARRIER.search(message):
        absent = _named(named[1], named[2], end.rank, live)
    elif all_here and len(live) == 1:
        absent = [_describe(live[0])]
    else:
        absent = [_describe(one) for one in live if _was_elsewhere(one)]
    more = len(absent) - MAX_NAMED
    return " and for ".join([*absent[:MAX_NAMED], *([f"{more} more"] if more > 0 else [])]) or None


def _named(own: str | None, ranks: str, rank: int, live: Sequence[LiveWorker]) -> list[str]:
    """The workers that a barrier names, by their ranks in its process group. These are taken for ranks of the job if
    the reporting worker has the same rank in both."""
    numbers = [int(number) for number in ranks.split(",")]
    if own is None or int(own) != rank:
        return [f"rank {number} of the process group" for number in numbers]
    known = {one.rank: one for one in live}
    return [_describe(known[number]) if number in known else f"rank {number}" for number in numbers]


def _was_elsewhere(one: LiveWorker) -> bool:
    return one.state in "TtD" or (one.state == "S" and _ELSEWHERE.search(one.wchan) is not None)


def _describe(one: LiveWorker) -> str:
    slept = f" (in {one.wchan})" if one.wchan else ""
    doing = {
        "T": "was stopped (SIGSTOP or the like)",
        "t": "was stopped by a debugger",
        "D": f"waited for a disk or a device{slept}",
        "S": f"slept{slept}",
        "R": "was running",
    }.get(one.state, "was alive")
    return f"rank {one.rank} (pid {one.pid}), which {doing}"
