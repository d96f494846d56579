"""`steps.py` as a script that loses no step: a checkpoint in memory every 50 steps, and the last one at a stop.

Its checkpoints are those of `dlrover_run.training`, and rank 0 saves for all. A line of its file is a step that is
done.
"""

import time

started = time.monotonic_ns()

from reporting import report  # noqa: E402 - the clock is read first

report("started", started)

import os  # noqa: E402 - a worker can be killed before it has imported torch
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from dlrover_run.training import CheckpointDirectory  # noqa: E402

PACE = 0.02
"""As in `steps.py`."""

CHECKPOINT_STEPS = 50

dist.init_process_group("gloo")
world = dist.get_world_size()
report(f"world-of-{world}")

leads = dist.get_rank() == 0
directory = Path(os.environ["BENCHMARK_RUN"])
checkpoints = CheckpointDirectory(directory / "checkpoints")
newest = checkpoints.load_latest(together=True)
count = saved = 0 if newest is None else newest.step

gradient = torch.ones(1000)
dist.all_reduce(gradient)
report(f"step-of-{world}")
with (
    open(directory / f"steps-{os.getpid()}" if leads else os.devnull, "ab", buffering=0) as steps,
    checkpoints.save_at_stop(lambda: (count, {"count": count}), memory=True) as last,
):
    while True:
        time.sleep(PACE)
        dist.all_reduce(gradient.fill_(1.0))
        count += 1
        steps.write(f"{count} {saved} {time.monotonic_ns()}\n".encode())
        if leads and count % CHECKPOINT_STEPS == 0:
            checkpoints.save(count, {"count": count}, memory=True)
            saved = count
        last.check()
