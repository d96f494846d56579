"""Trains with gloo, and reports its rank after a first step. SIGUSR1 to any rank ends all with success."""

import os
import signal
import time

import torch
import torch.distributed as dist
from post import post

signals = []
signal.signal(signal.SIGUSR1, lambda number, frame: signals.append(number))
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
post(
    node=os.environ["TEST_NODE"],
    world=int(total.item()),
    node_rank=int(os.environ["GROUP_RANK"]),
    nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    port=os.environ["MASTER_PORT"],
)
ended = torch.zeros(1)
while not ended.item():
    # Processes that start meanwhile need the machine, too.
    time.sleep(0.05)
    ended = torch.tensor(float(len(signals)))
    dist.all_reduce(ended)
dist.destroy_process_group()
