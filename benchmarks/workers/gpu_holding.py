"""A worker that holds most of its device's memory, beside two processes that hold it too and outlive it: see
`gpu/memory.py`. Without a GPU what they hold is a little memory of their own.

The processes are forked once the device is open, as data loaders are, and take no notice of SIGTERM.
"""

import os
import signal
import sys
import time

from reporting import report

report("started")

import torch  # noqa: E402

SHARE = 0.6
"""Of the device's memory, so that there is room for one worker only."""

LOADERS = 2
LINGER, LOOK = 3.0, 0.05
"""Seconds for which a loader lives longer than its worker, and how often it looks whether that has ended."""

SMALL = 64 << 20

on_cuda = "BENCHMARK_CUDA" in os.environ
device = torch.device("cuda", 0) if on_cuda else torch.device("cpu")
size = int(torch.cuda.mem_get_info(device)[1] * SHARE) if on_cuda else SMALL
try:
    held = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    held[:1].sum().item()
except torch.OutOfMemoryError:
    report("no-memory")
    sys.exit(1)
report("held")

parent = os.getpid()
for _ in range(LOADERS):
    if not os.fork():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        report("loader")
        while os.getppid() == parent:
            time.sleep(LOOK)
        time.sleep(LINGER)
        os._exit(0)
while True:
    time.sleep(1.0)
