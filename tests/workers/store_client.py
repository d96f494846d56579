"""A client of the store of its round, without torch, that reports itself and waits. SIGUSR1 has it use the store once
more and end with success."""

import os
import signal
import socket
import struct
import sys
import time

from post import post, wait_for_signals

from dlrover_run.workers.tcp_store import parser


def ping():
    store.sendall(struct.pack("<BI", parser.PING, 7))
    assert store.recv(4, socket.MSG_WAITALL) == struct.pack("<I", 7)


def succeed(number, frame):
    ping()
    sys.exit(0)


signal.signal(signal.SIGUSR1, succeed)


def connect():
    """Connect as torch's client does: a node without rank 0 may start its worker before the store is served."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


store = connect()
store.sendall(struct.pack("<BI", parser.VALIDATE, parser.MAGIC))
ping()
post(
    node=os.environ.get("TEST_NODE", ""),
    world=int(os.environ["WORLD_SIZE"]),
    node_rank=int(os.environ["GROUP_RANK"]),
    nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    port=os.environ["MASTER_PORT"],
    address=os.environ["MASTER_ADDR"],
)
wait_for_signals()
