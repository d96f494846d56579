"""The smallest possible launcher, for its memory: `bare_parent.py N script` starts N workers and waits."""

import os
import subprocess
import sys

count, script = int(sys.argv[1]), sys.argv[2]
workers = [
    subprocess.Popen(
        [sys.executable, "-u", script],
        env=os.environ | {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": "0"},
    )
    for rank in range(count)
]
for worker in workers:
    worker.wait()
