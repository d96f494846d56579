"""Adds up one number of each rank with a collective of torch, and prints the sum: the ranks are one world."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([2.0 ** dist.get_rank()])
dist.all_reduce(total)
print(
    f"rank {dist.get_rank()} on {os.uname().nodename}: all-reduce {int(total)} of {dist.get_world_size()} ranks",
    flush=True,
)
dist.destroy_process_group()
