"""Writes what it observes as files into the given folder, because a mailbox cannot be reached from another machine.

`start-RANK-N.json` has its variables, `SIGNAL-RANK` a line for each signal that it got. It exits with success when
there is a file `end`, after SIGTERM as soon as it has written, after SIGUSR1 as soon as all ranks have, if the second
argument is `leave`, and with code 7 when there is a file `fail-RANK`.
"""

import json
import os
import pathlib
import signal
import sys
import time

folder = pathlib.Path(sys.argv[1])
rank = os.environ["RANK"]


leaves = False


def note(number, frame):
    global leaves
    with (folder / f"{signal.Signals(number).name}-{rank}").open("a") as file:
        file.write(f"{os.getpid()}\n")
    if number == signal.SIGTERM:
        sys.exit(0)
    leaves = sys.argv[2:] == ["leave"]


def all_are_told():
    """Whether no rank is left that the end of this one would end before its own signal."""
    return all((folder / f"SIGUSR1-{each}").exists() for each in range(int(os.environ["WORLD_SIZE"])))


signal.signal(signal.SIGUSR1, note)
signal.signal(signal.SIGTERM, note)
NAMES = ("RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID", "SLURM_RESTART_COUNT", "DLROVER_REQUEUE_COUNT")
facts = {name: os.environ.get(name) for name in NAMES} | {"host": os.uname().nodename, "pid": os.getpid()}
draft = folder / f"draft-{rank}-{os.getpid()}-{time.monotonic_ns()}"
draft.write_text(json.dumps(facts))
draft.rename(folder / f"start-{rank}-{len(list(folder.glob(f'start-{rank}-*')))}.json")
while not (folder / "end").exists():
    if (folder / f"fail-{rank}").exists():
        sys.exit(7)
    if leaves and all_are_told():
        sys.exit(0)
    time.sleep(0.1)
print(f"rank {rank} of {os.environ['WORLD_SIZE']} has trained on {os.uname().nodename}", flush=True)
