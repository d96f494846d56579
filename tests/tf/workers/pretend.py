"""Stands in for a script of TensorFlow, without it: it reads its task from `TF_CONFIG`, uses the channel, and as a
server it answers an empty `GetStatus`. It posts its events to the test's mailbox, and executes the commands that the
test writes to the pipe of its name in the folder `PRETEND`, one on each line.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

HERE = Path(os.environ["PRETEND"])
CONFIG = json.loads(os.environ["TF_CONFIG"])
ROLE, INDEX = CONFIG["task"]["type"], CONFIG["task"]["index"]
SERVED = sys.argv[1:] == ["serve"]
FAILS_LATER = sys.argv[1:] == ["fail later"]
"""No server of a version after the first starts."""
NAME = f"{ROLE}-{os.environ['WORKER_ID']}"


def post(**fields: object) -> None:
    """Send the test a message."""
    message = {"name": NAME, "rank": INDEX, "pid": os.getpid(), "version": int(os.environ["TF_PS_VERSION"]), **fields}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mailbox:
        mailbox.sendto(json.dumps(message).encode(), "\0" + os.environ["TEST_MAILBOX"])


class Channel:
    """The connection of this process to its agent."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect("\0" + os.environ["TF_PS_AGENT"][1:])
        self.lines = self._socket.makefile("r")
        self.send(type="hello", token=os.environ["TF_PS_TASK_TOKEN"], pid=os.getpid())

    def send(self, **fields: object) -> None:
        self._socket.sendall(json.dumps(fields).encode() + b"\n")


def serve() -> None:
    """Answer `GetStatus` for ever."""
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    server = grpc.server(ThreadPoolExecutor(1))
    answer = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
    service = grpc.method_handlers_generic_handler("tensorflow.WorkerService", {"GetStatus": answer})
    server.add_generic_rpc_handlers((service,))
    port = CONFIG["cluster"]["ps"][INDEX].rpartition(":")[2]
    assert server.add_insecure_port(f"[::]:{port}") == int(port)
    server.start()
    post(at="serving", cluster=CONFIG["cluster"])
    threading.Event().wait()


def obey(channel: Channel) -> None:
    """Execute the commands that the test writes to this process's pipe, one on each line."""
    pipe = HERE / NAME
    os.mkfifo(pipe)
    # Opened for writing too: otherwise it would close when the writer of a command closes it, and lose the next
    # command.
    commands = os.fdopen(os.open(pipe, os.O_RDWR))
    post(at="up", cluster=CONFIG["cluster"])
    for command in commands:
        word, _, rest = command.strip().partition(" ")
        if word == "send":
            channel.send(**json.loads(rest))
            post(at="sent")
        elif word == "exit":
            os._exit(int(rest))
        elif word == "raise":
            print(f"Traceback (most recent call last):\n  File x\n{rest}", file=sys.stderr, flush=True)
            os._exit(1)


def listen(channel: Channel) -> None:
    """Post each order of the agent, and leave as ordered."""
    for line in channel.lines:
        order = json.loads(line)
        post(at="ordered", **{key: order[key] for key in ("open", "pause", "save", "ending")})
        if order["pause"] and ROLE == "worker":
            os._exit(75)
        if order["pause" if SERVED else "save"] and ROLE == "chief":
            channel.send(type="saved", step=7, path="/pretend/model.ckpt-7")
            os._exit(75)
        if order["ending"] and ROLE == "worker":
            os._exit(0)


def take_data() -> None:
    """Take parts from the job's queues. Worker 0 stops in the middle of its second part, until the test kills it."""
    from tf_ps_runner.hooks import DataShards
    from tf_ps_runner.worker.agent_connection import agent

    agent().report("ready")
    post(at="begins")
    for begin, _ in DataShards("train", size=60, shard_size=20).batches(10):
        post(at="took", begin=begin)
        while NAME == "worker-0" and begin == 30:
            time.sleep(60)


if sys.argv[1:] == ["data"] and ROLE == "worker":
    take_data()
    sys.exit()
print(f"{NAME} begins", flush=True)
signal.signal(signal.SIGUSR1, lambda number, frame: post(at="signalled"))
if ROLE == "ps":
    if FAILS_LATER and os.environ["TF_PS_VERSION"] != "1":
        sys.exit(3)
    serve()
signal.signal(signal.SIGTERM, signal.SIG_DFL)
channel = Channel()
if ROLE != "chief":
    channel.send(type="ready")
if sys.argv[1:] == ["stay"] and ROLE == "chief":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if SERVED and ROLE == "worker":
    post(at="serving")
    threading.Event().wait()
if ROLE == "worker":
    channel.send(type="step", step=0)
threading.Thread(target=obey, args=(channel,), daemon=True).start()
listen(channel)
