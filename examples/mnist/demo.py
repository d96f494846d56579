"""Train on handwritten digits with two workers, and kill one of them in the middle: the training continues.

python demo.py --directory demo
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
KILL_AT = 60
"""The step at which rank 1 is killed. The script has saved its third checkpoint by then, that of step 60."""


def main() -> int:
    """Run the job; returns its exit code, and 1 if no worker was killed or the training began again at step 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path("demo"), help="for the digits and the checkpoints")
    directory = parser.parse_args().directory
    digits, checkpoints = directory / "mnist_digits", directory / "mnist_checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    command = [
        *(sys.executable, "-m", "dlrover_run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"),
        *(HERE / "cnn_train.py", "--digits_dir", digits, "--checkpoint_dir", checkpoints, "--checkpoint_steps=20"),
    ]
    pid = 0
    killed = resumed_at = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            print(line, end="", flush=True)
            if found := re.match(r"rank 1 of 2 .* pid = (\d+)", line):
                pid = int(found[1])
            elif found := re.match(r"resume at step = (\d+)", line):
                resumed_at = int(found[1])
            elif killed is None and line.rstrip().endswith(f"step = {KILL_AT}"):
                killed = pid
                print(f"demo: kill -9 {pid}, which is rank 1", flush=True)
                os.kill(pid, signal.SIGKILL)
    if killed is None or resumed_at is None:
        print("demo: no worker was killed, or the training did not continue from a checkpoint", flush=True)
        return job.returncode or 1
    print(f"demo: after the kill the workers continued from the checkpoint of step {resumed_at}", flush=True)
    return job.returncode


if __name__ == "__main__":
    sys.exit(main())
