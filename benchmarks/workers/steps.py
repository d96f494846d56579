"""A worker that trains: one gloo allreduce after the other, for ever, and now and then a checkpoint of how many.

It reports its first line, the new world and its first step. The events name the size of the world, so that the driver
can tell a step of the smaller world from one of the larger. When each step was done the worker with rank 0 writes to a
file of its own in the room, for the driver to read later.
"""

import time

started = time.monotonic_ns()

from reporting import report  # noqa: E402 - the clock is read first

report("started", started)

import os  # noqa: E402 - who is to be killed is known before torch is imported
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

PACE = 0.02
"""Seconds of a step that are no communication; without them the ranks would take all the time of the processors."""

CHECKPOINT_STEPS = 50
"""Steps from one checkpoint to the next, a little more than a second. What comes after the last one is lost with it."""

dist.init_process_group("gloo")
world = dist.get_world_size()
report(f"world-of-{world}", time.monotonic_ns())

leads = dist.get_rank() == 0
room = Path(os.environ["LAUNCH_BENCH_ROOM"])
checkpoint = room / "checkpoint"
begin = torch.tensor([int(checkpoint.read_text()) if leads and checkpoint.exists() else 0])
dist.broadcast(begin, 0)
count = kept = int(begin.item())

gradient = torch.ones(1000)
dist.all_reduce(gradient)
report(f"step-of-{world}", time.monotonic_ns())
with open(room / f"steps-{os.getpid()}" if leads else os.devnull, "ab", buffering=0) as steps:
    while True:
        count += 1
        at_ns = time.monotonic_ns()
        if leads and count % CHECKPOINT_STEPS == 0:
            fresh = room / f"checkpoint-{os.getpid()}"
            fresh.write_text(str(count))
            fresh.rename(checkpoint)
            kept = count
        steps.write(f"{count} {kept} {at_ns}\n".encode())
        time.sleep(PACE)
        dist.all_reduce(gradient.fill_(1.0))
