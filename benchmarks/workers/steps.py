"""A worker that trains without end: each step is a gloo allreduce, and a checkpoint holds the number of steps.

It reports its first line, the new world and its first step. The events name the size of the world, so that steps of
worlds of different sizes can be distinguished. The worker with rank 0 writes the time of each step to a file of its own
in the run's directory. With BENCHMARK_COUNTS it reports its steps and checkpoints to dlrover-run too.
"""

import time

started = time.monotonic_ns()

from reporting import report  # noqa: E402 - the clock is read first

report("started", started)

import os  # noqa: E402 - a worker can be killed before it has imported torch
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

PACE = 0.02
"""Seconds that a step sleeps; without them the ranks would use all processors."""

CHECKPOINT_STEPS = 50
"""Steps between checkpoints, a little more than a second. A kill loses the steps after the last one."""

dist.init_process_group("gloo")
world = dist.get_world_size()
report(f"world-of-{world}")

leads = dist.get_rank() == 0
directory = Path(os.environ["BENCHMARK_RUN"])
checkpoint = directory / "checkpoint"
start = torch.tensor([int(checkpoint.read_text()) if leads and checkpoint.exists() else 0])
dist.broadcast(start, 0)
count = saved = int(start.item())

mark = os.devnull


def count_step() -> None:
    """Nothing, unless the steps are to be reported."""


if "BENCHMARK_COUNTS" in os.environ:
    from dlrover_run.training import report as count_step  # type: ignore[no-redef]

    mark = os.environ["DLROVER_CHECKPOINT_MARK"]

gradient = torch.ones(1000)
dist.all_reduce(gradient)
report(f"step-of-{world}")
count_step()
with open(directory / f"steps-{os.getpid()}" if leads else os.devnull, "ab", buffering=0) as steps:
    while True:
        count += 1
        at_ns = time.monotonic_ns()
        if leads and count % CHECKPOINT_STEPS == 0:
            fresh = directory / f"checkpoint-{os.getpid()}"
            fresh.write_text(str(count))
            fresh.rename(checkpoint)
            Path(mark).write_text(f"{count}\n")
            saved = count
        steps.write(f"{count} {saved} {at_ns}\n".encode())
        time.sleep(PACE)
        dist.all_reduce(gradient.fill_(1.0))
        count_step()
