"""A launcher of two nodes that follows a script, for `benchmarks/recovery.py`: `scripted_launcher.py MANNER NODE`.

Node 0 sees the fault and does all that is to be done then. MANNER says what: `restarts`, `shrinks`, `grows`, `hangs`
or `gives-up`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

STEP_PACE = 0.001

room = Path(os.environ["LAUNCH_BENCH_ROOM"])
meeting = room / "meeting"


def report(event: str, rank: int, attempt: int) -> None:
    with open(room / "reports", "wb", buffering=0) as reports:
        reports.write(f"{event} {rank} {attempt} {os.getpid()} {time.monotonic_ns()}\n".encode())


def begin_worker(rank: int, world: int, attempt: int) -> int:
    """Fork a worker that says what a worker says and then steps until it is killed; its process id."""
    if pid := os.fork():
        return pid
    for event in ("started", f"world-of-{world}", f"step-of-{world}"):
        report(event, rank, attempt)
    # Every step is a checkpoint, so a later worker goes on where the earlier ones were.
    count = sum(len(path.read_bytes().splitlines()) for path in room.glob("steps-*"))
    with open(room / f"steps-{os.getpid()}" if rank == 0 else os.devnull, "ab", buffering=0) as steps:
        while True:
            count += 1
            steps.write(f"{count} {count} {time.monotonic_ns()}\n".encode())
            time.sleep(STEP_PACE)


def follow(manner: str) -> None:
    """Node 1: its worker, unless it comes to a world of one."""
    worker = os.getpid() if manner == "grows" else begin_worker(1, 2, 0)
    meeting.write_text(f"{worker}\n")
    if manner == "grows":
        signal.pause()
    os.waitpid(worker, 0)


def lead(manner: str) -> None:
    """Node 0: its worker, and what comes after the fault."""
    old = begin_worker(0, 1 if manner == "grows" else 2, 0)
    other = int(meeting.read_text())
    if manner != "grows":
        select.select([os.pidfd_open(other), os.pidfd_open(old)], [], [])
    for worker in (old,) if manner == "grows" else (old, other):
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    os.waitpid(old, 0)
    if manner == "gives-up":
        return
    if manner != "hangs":
        world = 1 if manner == "shrinks" else 2
        for rank in range(world):
            begin_worker(rank, world, 1)
    signal.pause()


with contextlib.suppress(FileExistsError):
    os.mkfifo(meeting)
(lead if sys.argv[2] == "0" else follow)(sys.argv[1])
