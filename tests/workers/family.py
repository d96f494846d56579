"""A worker with descendants that do their best to get away, and with something in /dev/shm."""

import os
import signal
import subprocess
import sys
from multiprocessing import shared_memory

from post import post

# A child of its own session without our environment, an ordinary child, and a grandchild whose parent is gone.
away = subprocess.Popen(["setsid", "sleep", "1000"], env={"PATH": os.environ["PATH"]})
child = subprocess.Popen(["sleep", "1000"])
middle = subprocess.run(
    ["sh", "-c", "setsid sleep 1000 >/dev/null & echo $!"],
    stdout=subprocess.PIPE,
    text=True,
    check=True,
)
# Python's resource tracker, one more child, is to remove this when the worker has died.
segment = shared_memory.SharedMemory(create=True, size=4096)
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
# As a data loader: it shares the tracker's pipe, so the tracker waits for its end too.
loader = os.fork()
if loader:
    post(family=[away.pid, child.pid, int(middle.stdout), loader], segment=segment.name)
while True:
    signal.pause()
