"""A job whose throughput is a given function of its number of nodes: `planted.py 50,100,102,104`.

Each worker has its batch, so a step is as much work as there are nodes. Rank 0 notes the time and the work of each
step. The job ends when there is a file `end`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from dlrover_run.training import report

HERE = Path(os.environ["BENCHMARK_RUN"])


def main() -> None:
    nodes = int(os.environ["WORLD_SIZE"])
    seconds = nodes / float(sys.argv[1].split(",")[nodes - 1])
    began, steps = time.monotonic(), 0
    with (HERE / f"work-{os.getpid()}").open("w", buffering=1) as notes:
        while not (HERE / "end").exists():
            steps += 1
            # Late steps are caught up with.
            time.sleep(max(0.0, began + steps * seconds - time.monotonic()))
            report()
            if os.environ["RANK"] == "0":
                notes.write(f"{time.monotonic()} {nodes}\n")


if __name__ == "__main__":
    main()
