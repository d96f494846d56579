"""Makes a step each half second, from the last checkpoint on, and writes the number of each to `steps-RANK`.

SIGUSR2 has it save after its step and mark the checkpoint, SIGUSR1 ends it with success.
"""

import os
import signal
import sys
import time
from pathlib import Path

from post import post

from dlrover_run.training import mark_checkpoint

wanted = False


def save(number, frame):
    global wanted
    wanted = True


signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(0))
signal.signal(signal.SIGUSR2, save)
checkpoint = Path("checkpoint")
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
post(
    node=os.environ["TEST_NODE"],
    world=int(os.environ["WORLD_SIZE"]),
    node_rank=int(os.environ["GROUP_RANK"]),
    nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    port=os.environ["MASTER_PORT"],
)
with open(f"steps-{os.environ['RANK']}", "a", buffering=1) as log:
    while True:
        time.sleep(0.5)
        step += 1
        log.write(f"{step}\n")
        if wanted:
            wanted = False
            checkpoint.with_name("checkpoint.new").write_text(str(step))
            checkpoint.with_name("checkpoint.new").replace(checkpoint)
            post(saved=step)
            mark_checkpoint(step)
