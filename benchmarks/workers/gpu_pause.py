"""Saves a state on the device in memory, and copies it to memory that was prepared for it: prints the seconds of each.
See `gpu/pauses.py`. Without a GPU the state and its copies are in ordinary memory.

A line is `pause WHAT SECONDS`; the last one says that what was restored is what was saved.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dlrover_run.training import CheckpointDirectory

TENSORS = 8
SAVES, COPIES = 3, 3
WRITE_LOOK = 0.05

mebibytes = int(os.environ["BENCHMARK_MEBIBYTES"])
on_cuda = "BENCHMARK_CUDA" in os.environ
device = torch.device("cuda", 0) if on_cuda else torch.device("cpu")
numbers = mebibytes * 2**20 // 4 // TENSORS
state = {f"layer {number}": torch.randn(numbers, device=device) for number in range(TENSORS)}


def synchronize() -> None:
    if on_cuda:
        torch.cuda.synchronize()


def pause(what: str, work: Callable[[], object]) -> None:
    """Print for how long a loop stands still for this, with all that its device has to do for it."""
    synchronize()
    began = time.monotonic()
    work()
    synchronize()
    print("pause", what, time.monotonic() - began, flush=True)


def copy_all() -> None:
    for name, tensor in state.items():
        prepared[name].copy_(tensor, non_blocking=True)


checkpoints = CheckpointDirectory("checkpoints", keep=1)
for step in range(1, SAVES + 1):
    saved: list[Path] = []
    pause("save", lambda step=step, saved=saved: saved.append(checkpoints.save(step, state, memory=True)))  # type: ignore
    # The next save finds the disk as idle as this one did, and the memory free again.
    while not saved[0].exists():
        time.sleep(WRITE_LOOK)

prepared = {name: torch.zeros(numbers, pin_memory=on_cuda) for name in state}
for _ in range(COPIES):
    pause("copy", copy_all)
pause("pageable", lambda: [tensor.cpu() if on_cuda else tensor.clone() for tensor in state.values()])

found = None


def restore() -> None:
    global found
    newest = checkpoints.load_latest()
    assert newest is not None
    found = {name: tensor.to(device) for name, tensor in newest.state.items()}


pause("restore", restore)
if found is None or not all(torch.equal(found[name], tensor) for name, tensor in state.items()):
    sys.exit("what was restored is not what was saved")
print("pause same 0", flush=True)
