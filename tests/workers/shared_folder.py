"""Writes what it observes as files into the given folder, because a mailbox cannot be reached from another machine.

`start-RANK-N.json` has its variables, `SIGNAL-RANK` a line for each signal that it got. It exits with success when
there is a file `end`, after SIGTERM (and SIGUSR1, if the second argument is `leave`) as soon as it has written, and
with code 7 when there is a file `fail-RANK`.
"""

import json
import os
import pathlib
import signal
import sys
import time

folder = pathlib.Path(sys.argv[1])
rank = os.environ["RANK"]


def note(number, frame):
    with (folder / f"{signal.Signals(number).name}-{rank}").open("a") as file:
        file.write(f"{os.getpid()}\n")
    if number == signal.SIGTERM or sys.argv[2:] == ["leave"]:
        sys.exit(0)


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
    time.sleep(0.1)
print(f"rank {rank} of {os.environ['WORLD_SIZE']} has trained on {os.uname().nodename}", flush=True)
