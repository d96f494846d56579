"""Trains in blocks of Survivor until a file `stop` is there. The state is the sum of the numbers of the steps."""

import os
import sys
import time

from mesh_group import MeshGroup
from post import post

from dlrover_run.training import Survivor, report

group = MeshGroup()
step, state = 0, {"sum": 0}
for round in Survivor(group=group).rounds():
    with round:
        mine = step
        step, found = round.newest(step, state.copy)
        state.update(found or {})
        assert state["sum"] == step * (step + 1) // 2
        post(rank=round.rank, world=round.world_size, mine=mine, step=step, variable=os.environ["RANK"])
        print(f"pid {os.getpid()} rank {round.rank} from step {step}", flush=True)
        while not any(group.of_all(os.path.exists("stop"))):
            total = sum(group.of_all(step + 1)) // round.world_size
            state["sum"], step = state["sum"] + total, step + 1
            report()
            time.sleep(0.01)
            round.check()
assert state["sum"] == step * (step + 1) // 2
post(done=step)
sys.exit(0)
