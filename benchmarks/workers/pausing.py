"""Saves a state in turns, to the disk and in memory, and prints for how long each save has stopped the loop."""

import sys
import time
from pathlib import Path

import torch

from dlrover_run.training import CheckpointDirectory

megabytes, turns, rest = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
state = {f"layer {number}": torch.rand(megabytes * 1024 * 1024 // 4 // 20) for number in range(20)}
checkpoints = CheckpointDirectory("checkpoints", keep=1)
step = 0


def pause(memory: bool) -> tuple[float, float]:
    """The seconds of a save, and those of processor time in them."""
    global step
    step += 1
    began, processor = time.monotonic(), time.process_time()
    file = checkpoints.save(step, state, memory=memory)
    seconds = time.monotonic() - began, time.process_time() - processor
    while not Path(file).exists():
        # Not measured: the next save finds the disk as idle as this one did.
        time.sleep(0.05)
    time.sleep(rest)
    return seconds


for _ in range(turns):
    print("pause", *pause(False), *pause(True), flush=True)
