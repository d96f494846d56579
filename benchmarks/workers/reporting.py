"""How a worker of the benchmark speaks to the driver: one line into a FIFO, and a gate to wait at.

Only what every interpreter has loaded already is imported here, so that a script that "imports nothing" stays one.
"""

from __future__ import annotations

import os


def report(event: str, at_ns: int) -> None:
    """Tell the driver that `event` happened at `at_ns`, nanoseconds of CLOCK_MONOTONIC, the same on the whole machine.

    A line is shorter than PIPE_BUF, so lines of several workers never mix. Without O_NONBLOCK a worker that outlives
    the driver would wait here for a reader for ever.
    """
    rank = os.environ["RANK"]
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    reports = os.open(os.path.join(os.environ["LAUNCH_BENCH_ROOM"], "reports"), os.O_WRONLY | os.O_NONBLOCK)
    os.write(reports, f"{event} {rank} {restart} {os.getpid()} {at_ns}\n".encode())
    os.close(reports)


def open_gate() -> int:
    """The gate's descriptor, to be opened before the report after which the driver may close the gate."""
    gate = os.open(os.path.join(os.environ["LAUNCH_BENCH_ROOM"], "gate"), os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(gate, True)
    return gate


def wait_at(gate: int) -> None:
    """Wait until the driver closes its end; it never writes, so what comes is the end of file."""
    os.read(gate, 1)
