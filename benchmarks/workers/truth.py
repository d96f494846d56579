"""A worker that keeps a log of its own of what it does, and ends in some of its rounds as its plan says.

The plan in the run's directory is a JSON file: for each round the rank that ends in it, after how many steps, and how;
None for the last. BENCHMARK_TRUTH has the steps from one checkpoint to the next, and the seconds to the first step.
"""

import json
import os
import signal
import time
from pathlib import Path

from dlrover_run.observe import page

folder = Path(os.environ["BENCHMARK_RUN"])
save_every, begins_after = os.environ["BENCHMARK_TRUTH"].split()
rank, round_ = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with open("/proc/self/stat", "rb") as stat:
    ticks = int(stat.read().rpartition(b")")[2].split()[19])
own = os.open(folder / f"truth.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

PACE = 0.02
"""Seconds of a step."""


def note(what: str, at: float) -> None:
    os.write(own, json.dumps({"round": round_, "what": what, "at": at, "pid": os.getpid()}).encode() + b"\n")


age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
note("begins", time.monotonic() - age)
time.sleep(float(begins_after))
ends, steps, how = json.loads((folder / "plan.json").read_text())[round_]
for step in range(1, steps + 1):
    time.sleep(PACE)
    page.add(int(page.StepSource.REPORT))
    if step == 1:
        note("works", time.monotonic())
    if rank == 0 and step % int(save_every) == 0:
        Path(os.environ["DLROVER_CHECKPOINT_MARK"]).write_text(f"{step}\n")
        note("saved", time.monotonic())
if ends is None:
    note("succeeds", time.monotonic())
elif ends == rank:
    note("fails", time.monotonic())
    if how == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.Signals[how])
else:
    time.sleep(600)
