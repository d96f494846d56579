"""Trains a sharded state and saves it with `torch.distributed.checkpoint`; the last rank kills itself at KILL_AT."""

import os
import signal

import torch
import torch.distributed as dist
from post import post
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dlrover_run.training import CheckpointDirectory, distributed_checkpoint

ROWS = 12

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
# The second one is the same on all ranks, of which torch saves it once.
state = {
    "sharded": distribute_tensor(torch.zeros(ROWS, 4), mesh, [Shard(0)]),
    "whole": torch.zeros(3),
    "plain": {"steps": 0},
}
checkpoints = CheckpointDirectory("checkpoints", rank=rank, world_size=world)
step = distributed_checkpoint.load(checkpoints, state) or 0
whole = state["sharded"].full_tensor()
expected = step * torch.arange(1.0, ROWS + 1)[:, None].expand(ROWS, 4)
assert torch.equal(whole, expected), whole
assert torch.equal(state["whole"], torch.full((3,), float(step)))
assert state["plain"]["steps"] == step
post(resumed=step)
rows = distribute_tensor(torch.arange(1.0, ROWS + 1)[:, None].expand(ROWS, 4).contiguous(), mesh, [Shard(0)])
while step < int(os.environ["STEPS"]):
    state["sharded"] = state["sharded"] + rows
    state["whole"] = state["whole"] + 1
    step += 1
    state["plain"] = {"steps": step}
    if os.environ.get("KILL_AT") == str(step) and rank == world - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    distributed_checkpoint.save(checkpoints, step, state, memory=os.environ["MEMORY"] == "1")
dist.destroy_process_group()
