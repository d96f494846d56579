"""Reports of a worker to the benchmark: lines in a FIFO of the run's directory, and a gate to wait at.

It imports only what every interpreter has loaded already, so that a script that "imports nothing" stays one.
"""

from __future__ import annotations

import os
import time

_reports: list[int] = []


def report(event: str, at_ns: int | None = None, rank: int | None = None, attempt: int | None = None) -> None:
    """Report that `event` happened at `at_ns` (now if None), in nanoseconds of CLOCK_MONOTONIC, which is the same in
    every process.

    A worker of torch has its rank and the number of its attempt in its environment. A task of TensorFlow gives its rank
    and the step of the model. A line is shorter than PIPE_BUF, so lines of several workers never mix. If the benchmark
    reads so late that the FIFO is full, the line is lost.
    """
    at_ns = time.monotonic_ns() if at_ns is None else at_ns
    rank = int(os.environ["RANK"]) if rank is None else rank
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if attempt is None else attempt
    if not _reports:
        # Without O_NONBLOCK, a worker that outlives the benchmark would wait here for a reader.
        _reports.append(os.open(os.path.join(os.environ["BENCHMARK_RUN"], "reports"), os.O_WRONLY | os.O_NONBLOCK))
    try:
        os.write(_reports[0], f"{event} {rank} {attempt} {os.getpid()} {at_ns}\n".encode())
    except BlockingIOError:
        return


def open_gate() -> int:
    """The descriptor of the gate, to be opened before the report after which the benchmark may close the gate."""
    gate = os.open(os.path.join(os.environ["BENCHMARK_RUN"], "gate"), os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(gate, True)
    return gate


def wait_at(gate: int) -> None:
    """Wait until the benchmark closes its end. It never writes, so what comes is the end of file."""
    os.read(gate, 1)
