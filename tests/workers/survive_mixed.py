"""Meets the others in blocks of Survivor until a file `stop` is there, but for the rank in the file `plain`, whose
script has no block."""

import contextlib
import os
import time
from pathlib import Path

from mesh_group import MeshGroup
from post import post

from dlrover_run.training import Survivor

group = MeshGroup()


def train(check):
    post(rank=group.rank)
    while not any(group.of_all(os.path.exists("stop"))):
        time.sleep(0.01)
        check()


plain = ""
with contextlib.suppress(FileNotFoundError):
    plain = Path("plain").read_text()
if os.environ["RANK"] == plain:
    group.open_as_in_any_script()
    train(lambda: None)
else:
    for round in Survivor(group=group).rounds():
        with round:
            train(round.check)
