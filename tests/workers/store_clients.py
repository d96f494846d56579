"""Workers that are only clients of the store of their round. Rank 0 ends first; the others use it afterwards."""

import os
import select
from datetime import timedelta

from torch.distributed import TCPStore

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
store.set(f"pid {rank}", str(os.getpid()))
store.wait([f"pid {other}" for other in range(world)])
if rank == 0:
    store.wait([f"rank {other} watches" for other in range(1, world)])
else:
    first = os.pidfd_open(int(store.get("pid 0")))
    store.set(f"rank {rank} watches", "")
    select.select([first], [], [])
    store.set(f"rank {rank} goes on", "")
    store.wait([f"rank {other} goes on" for other in range(1, world)])
