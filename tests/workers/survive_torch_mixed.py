"""Trains with torch in blocks of Survivor until a file `stop` is there, but for the rank in the file `plain`, whose
script has no block."""

import contextlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from post import post

from dlrover_run.training import Survivor


def train(check):
    post(rank=dist.get_rank())
    ends = torch.tensor([0])
    while not ends.item():
        ends = torch.tensor([int(os.path.exists("stop"))])
        dist.all_reduce(ends)
        time.sleep(0.01)
        check()


plain = ""
with contextlib.suppress(FileNotFoundError):
    plain = Path("plain").read_text()
if os.environ["RANK"] == plain:
    dist.init_process_group("gloo")
    train(lambda: None)
else:
    for round in Survivor("gloo").rounds():
        with round:
            train(round.check)
