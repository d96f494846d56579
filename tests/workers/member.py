"""Reports its ranks in the job and waits. SIGUSR1 ends it with success, SIGUSR2 with an exception.

With the argument `stay` it reports a SIGTERM and continues.
"""

import os
import signal
import sys

from post import post, wait_for_signals


def succeed(number, frame):
    sys.exit(0)


def fail(number, frame):
    raise RuntimeError("the disk under this worker is gone")


signal.signal(signal.SIGUSR1, succeed)
signal.signal(signal.SIGUSR2, fail)
if "stay" in sys.argv:
    signal.signal(signal.SIGTERM, lambda number, frame: post(told="SIGTERM"))
post(
    node=os.environ["TEST_NODE"],
    world=int(os.environ["WORLD_SIZE"]),
    node_rank=int(os.environ["GROUP_RANK"]),
    nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    port=os.environ["MASTER_PORT"],
)
wait_for_signals()
