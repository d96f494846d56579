"""Trains with gloo in steps that all ranks take together, and keeps their number in a file, as a checkpoint does.

SIGUSR2 to any rank makes all of them report their step; SIGUSR1 to any ends all with success. SIGALRM makes a rank
hang.
"""

import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from post import post

CHECKPOINT = Path("steps")


def hang(number, frame):
    held = threading.Lock()
    held.acquire()
    held.acquire()


ended, asked = [], []
signal.signal(signal.SIGALRM, hang)
signal.signal(signal.SIGUSR1, lambda number, frame: ended.append(number))
signal.signal(signal.SIGUSR2, lambda number, frame: asked.append(number))

dist.init_process_group("gloo")
rank = dist.get_rank()
step = torch.tensor(int(CHECKPOINT.read_text()) if rank == 0 and CHECKPOINT.exists() else 0)
dist.broadcast(step, 0)
place = {
    "node": os.environ["TEST_NODE"],
    "world": dist.get_world_size(),
    "node_rank": int(os.environ["GROUP_RANK"]),
    "nodes": int(os.environ["GROUP_WORLD_SIZE"]),
    "port": os.environ["MASTER_PORT"],
}
post(**place, step=int(step))
while True:
    # The duration of a step; without it the test would measure how many steps a second the machine does.
    time.sleep(0.05)
    received = len(asked)
    del asked[:received]
    all_took = torch.tensor([1, len(ended), received])
    dist.all_reduce(all_took)
    assert all_took[0] == place["world"]
    step += 1
    if rank == 0:
        CHECKPOINT.with_suffix(".new").write_text(str(int(step)))
        CHECKPOINT.with_suffix(".new").rename(CHECKPOINT)
    if all_took[2]:
        post(**place, step=int(step))
    if all_took[1]:
        break
dist.destroy_process_group()
