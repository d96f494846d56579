"""Joins a gloo group, proves that it works, reports, and trains until it is stopped."""

import torch
import torch.distributed as dist
from post import post

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
post(world=int(total.item()))
while True:
    dist.all_reduce(torch.ones(1000))
