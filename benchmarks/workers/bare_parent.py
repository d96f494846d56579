"""The smallest launcher there can be: `bare_parent.py N script` starts N workers and waits. For memory only."""

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
