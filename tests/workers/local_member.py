"""Reports its node of a local cluster, and waits. SIGUSR1 ends it with success, SIGUSR2 with the code 7.

With the argument `deaf` it ignores stop signals; with `service` it leaves a process in its own session.
"""

import os
import signal
import sys

from post import post, wait_for_signals

signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(0))
signal.signal(signal.SIGUSR2, lambda number, frame: sys.exit(7))
if "deaf" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "service" in sys.argv and os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            signal.pause()
    os._exit(0)
names = ("DLROVER_LOCAL_NODE", "DLROVER_LOCAL_CLUSTER", "NODE_ID", "WORKER_ID")
post(
    world=int(os.environ["WORLD_SIZE"]),
    node_rank=int(os.environ["GROUP_RANK"]),
    nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    port=os.environ["MASTER_PORT"],
    names=[os.environ.get(name) for name in names],
    node=int(os.environ["DLROVER_LOCAL_NODE"]),
)
wait_for_signals()
