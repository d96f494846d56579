"""`steps.py` as a script whose survivors keep their processes: a newcomer takes the number of steps from one of them.

It needs `--survivors=keep` and torch 2.14 or later. A line of its file is a step that is done; nothing is saved,
because the other worker has the state.
"""

import time

started = time.monotonic_ns()

from reporting import report  # noqa: E402 - the clock is read first

report("started", started)

import os  # noqa: E402 - a worker can be killed before it has imported torch
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from dlrover_run.training import Survivor  # noqa: E402

PACE = 0.02
"""As in `steps.py`."""

count = 0
gradient = torch.ones(1000)
file = Path(os.environ["BENCHMARK_RUN"]) / f"steps-{os.getpid()}"
for round in Survivor("gloo").rounds():
    with round:
        report(f"world-of-{round.world_size}")
        count, _ = round.newest(count, lambda: None)
        dist.all_reduce(gradient.fill_(1.0))
        report(f"step-of-{round.world_size}")
        with open(os.devnull if round.rank else file, "ab", buffering=0) as steps:
            while True:
                time.sleep(PACE)
                dist.all_reduce(gradient.fill_(1.0))
                count += 1
                steps.write(f"{count} {count} {time.monotonic_ns()}\n".encode())
                round.check()
