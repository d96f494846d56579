"""Answers the orders of a node check as a test specifies, without torch (`dlrover_run/features/node_check/check`).

Each order is recorded in the file `orders` of the working directory. The first line of `behave`, if there is such a
file, specifies the next behavior; the process that follows it removes it. `0 die` is for local rank 0 only.
"""

import fcntl
import json
import os
import signal
import sys

RANK = os.environ["LOCAL_RANK"]


def note(what: dict) -> None:
    with open("orders", "a") as file:
        file.write(json.dumps({"local_rank": int(RANK), "pid": os.getpid(), **what}) + "\n")


def behaviour(moment: str) -> str:
    """Return the behavior that the test wants now, and remove it; `moment` is the order, or `start`."""
    if not os.path.exists("behave"):
        return ""
    with open("behave", "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = file.read().splitlines()
        for line in lines:
            rank, at, what = line.split(maxsplit=2)
            if rank == RANK and at == moment:
                lines.remove(line)
                file.seek(0)
                file.truncate()
                file.write("".join(f"{rest}\n" for rest in lines))
                return what
    return ""


def hang() -> None:
    """Never answer, and report this to the test."""
    if os.path.exists("hung"):
        with open("hung", "w") as fifo:
            fifo.write("x")
    signal.pause()


def obey(order: dict, what: str) -> None:
    done = {"done": order["do"], **({"name": order["name"]} if "name" in order else {})}
    if what.startswith("die"):
        sys.stderr.write("what it said last\n")
        sys.stderr.flush()
        os.kill(os.getpid(), int(what.split()[1]))
    if what.startswith("exit"):
        raise LookupError("nothing there")
    if what == "complain":
        for _ in range(5000):
            sys.stderr.write("a long complaint of a library, which is of no use to anybody\n")
        sys.stderr.write("the last of them\n\n")
        sys.exit(3)
    if what.startswith("signal"):
        # The agent, which is the parent of a forked process too.
        os.kill(os.getppid(), int(what.split()[1]))
        signal.pause()
    if what == "hang":
        hang()
    if what == "babble":
        os.write(1, b"babble\n")
    elif what.startswith("end"):
        os.write(1, json.dumps({**done, "problem": "it hung", "ends": True}).encode() + b"\n")
        signal.pause()
    elif what.startswith("problem"):
        os.write(1, json.dumps({**done, "problem": what.partition(" ")[2], "wrong": "wrong" in what}).encode() + b"\n")
    elif order["do"] == "compute":
        speed = float(what.split()[1]) if what.startswith("speed") else 1.0 + int(RANK)
        os.write(1, json.dumps({**done, "device": "fake", "tflops": speed}).encode() + b"\n")
    else:
        shared = {"shared": what.partition(" ")[2]} if what.startswith("shared") else {}
        os.write(1, json.dumps({**done, "gigabytes": 8.0 - int(RANK), **shared}).encode() + b"\n")


if behaviour("start") == "hang":
    hang()
for line in sys.stdin:
    order = json.loads(line)
    note(order)
    obey(order, behaviour(order["do"]))
