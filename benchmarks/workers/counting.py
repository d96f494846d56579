"""A worker without torch that makes steps at a rate, and has as many connections as a rank among others.

BENCHMARK_RATE is its steps a second; with BENCHMARK_COUNTS=1 it reports each of them to the launcher. It notes the rate
that it reaches in a file of its own in the run's directory.
"""

import os
import socket
import time
from pathlib import Path

from reporting import report

from dlrover_run.observe import page

CONNECTIONS = 16
NOTE_INTERVAL = 1.0

rate, reports = float(os.environ["BENCHMARK_RATE"]), os.environ["BENCHMARK_COUNTS"] == "1"
with socket.create_server(("127.0.0.1", 0), backlog=CONNECTIONS) as server:
    ends = [socket.create_connection(server.getsockname()) for _ in range(CONNECTIONS)]
    ends += [server.accept()[0] for _ in range(CONNECTIONS)]

report("started")
notes = Path(os.environ["BENCHMARK_RUN"]) / f"rate-{os.getpid()}"
noted, count = time.monotonic(), 0
with open(notes, "w", buffering=1) as file:
    due = time.monotonic()
    while True:
        # A little late, it catches up.
        due = max(due + 1 / rate, time.monotonic() - 0.05)
        time.sleep(max(0.0, due - time.monotonic()))
        if reports:
            page.add(page.StepSource.REPORT, 1, 32, 0.0)
        count += 1
        if due - noted >= NOTE_INTERVAL:
            file.write(f"{count / (due - noted):.1f}\n")
            noted, count = due, 0
