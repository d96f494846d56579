"""Stands in for a script of TensorFlow whose throughput depends on the number of its tasks: arguments are the steps per
second with one task that trains, with two, and so on; the MiB that the tables have, of which each server has its share;
and the file with which the chief ends."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

CONFIG = json.loads(os.environ["TF_CONFIG"])
ROLE, INDEX = CONFIG["task"]["type"], CONFIG["task"]["index"]
RATES = [float(one) for one in sys.argv[1].split(",")]
TABLES = int(sys.argv[2])
END = Path(sys.argv[3])
HERE = END.parent / "trainers"
SAVED = END.parent / "saved"


class Channel:
    """The connection of this process to its agent."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect("\0" + os.environ["TF_PS_AGENT"][1:])
        self._turn = threading.Lock()
        self.lines = self._socket.makefile("r")
        self.send(type="hello", token=os.environ["TF_PS_TASK_TOKEN"], pid=os.getpid())

    def send(self, **fields: object) -> None:
        with self._turn:
            self._socket.sendall(json.dumps(fields).encode() + b"\n")


def serve() -> None:
    """Answer `GetStatus` for ever, with a part of the tables in memory."""
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    part = b"x" * ((TABLES << 20) // len(CONFIG["cluster"]["ps"]))
    server = grpc.server(ThreadPoolExecutor(1))
    answer = grpc.unary_unary_rpc_method_handler(lambda request, context: part[:0])
    service = grpc.method_handlers_generic_handler("tensorflow.WorkerService", {"GetStatus": answer})
    server.add_generic_rpc_handlers((service,))
    port = CONFIG["cluster"]["ps"][INDEX].rpartition(":")[2]
    assert server.add_insecure_port(f"[::]:{port}") == int(port)
    server.start()
    threading.Event().wait()


def trainers() -> int:
    """How many tasks train."""
    return sum(Path(f"/proc/{each.name}").exists() for each in HERE.iterdir())


class Steps:
    """The global step, which the chief makes for all tasks."""

    def __init__(self, first: int) -> None:
        self.step = float(first)

    def make(self, channel: Channel) -> None:
        last = time.monotonic()
        while not END.exists():
            time.sleep(0.1)
            now = time.monotonic()
            self.step += (now - last) * RATES[trainers() - 1]
            last = now
            channel.send(type="step", step=int(self.step))
        os._exit(0)


def lead(channel: Channel) -> None:
    first = int(SAVED.read_text()) if SAVED.exists() else 0
    made = Steps(first)
    how = {"how": "checkpoint", "path": str(SAVED)} if SAVED.exists() else {"how": "fresh"}
    channel.send(type="restored", step=first, **how)
    began = False
    for line in channel.lines:
        order = json.loads(line)
        if order["open"] and not began:
            began = True
            threading.Thread(target=made.make, args=(channel,), daemon=True).start()
        if order["save"]:
            step = int(made.step)
            SAVED.write_text(str(step))
            channel.send(type="step", step=step)
            channel.send(type="saved", step=step, path=str(SAVED))
            os._exit(75)


def work(channel: Channel) -> None:
    channel.send(type="ready")
    for line in channel.lines:
        order = json.loads(line)
        if order["pause"]:
            os._exit(75)
        if order["ending"]:
            os._exit(0)


if ROLE == "ps":
    serve()
HERE.mkdir(exist_ok=True)
(HERE / str(os.getpid())).touch()
(lead if ROLE == "chief" else work)(Channel())
