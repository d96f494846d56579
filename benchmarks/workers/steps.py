"""A worker that trains: one gloo allreduce after the other, for ever. It reports the first one.

The event names the size of the world, so that the driver can tell a step of the smaller world from one of the larger.
"""

import time

import torch
import torch.distributed as dist
from reporting import report

PACE = 0.02
"""Seconds of a step that are no communication; without them the ranks would take all the time of the processors."""

dist.init_process_group("gloo")
gradient = torch.ones(1000)
dist.all_reduce(gradient)
report(f"step-of-{dist.get_world_size()}", time.monotonic_ns())
while True:
    time.sleep(PACE)
    dist.all_reduce(gradient.fill_(1.0))
