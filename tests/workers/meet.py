"""Joins a gloo group and adds up the ranks."""

import os

import torch
import torch.distributed as dist
from post import post

dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank()))
dist.all_reduce(total)
post(sum=total.item(), group_rank=os.environ["GROUP_RANK"])
dist.barrier()
dist.destroy_process_group()
