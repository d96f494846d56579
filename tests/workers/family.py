"""A worker with descendants that try to escape, and with a file in /dev/shm."""

import os
import signal
import subprocess
import sys
from multiprocessing import shared_memory

from post import post

# A child in its own session without our environment, an ordinary child, and an orphaned grandchild.
away = subprocess.Popen(["setsid", "sleep", "1000"], env={"PATH": os.environ["PATH"]})
child = subprocess.Popen(["sleep", "1000"])
middle = subprocess.run(
    ["sh", "-c", "setsid sleep 1000 >/dev/null & echo $!"],
    stdout=subprocess.PIPE,
    text=True,
    check=True,
)
# Python's resource tracker, one more child, removes this after the death of the worker.
segment = shared_memory.SharedMemory(create=True, size=4096)
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
# Like a data loader: it shares the tracker's pipe, so the tracker waits for its end too.
loader = os.fork()
if loader:
    post(family=[away.pid, child.pid, int(middle.stdout), loader], segment=segment.name)
while True:
    signal.pause()
