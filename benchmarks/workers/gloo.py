"""A worker that joins a gloo process group, reports it, and waits to be killed or released."""

import time

import torch.distributed as dist
from reporting import open_gate, report, wait_at

dist.init_process_group("gloo")
initialised = time.monotonic_ns()
gate = open_gate()
report("initialised", initialised)
wait_at(gate)
dist.destroy_process_group()
