"""A client of the store of its round, without torch, that reports itself and waits. SIGUSR1 has it use the store once
more and end with success."""

import os
import signal
import socket
import struct
import sys

from post import post, wait_for_signals

from dlrover_run.workers.tcp_store import parser


def ping():
    store.sendall(struct.pack("<BI", parser.PING, 7))
    assert store.recv(4, socket.MSG_WAITALL) == struct.pack("<I", 7)


def succeed(number, frame):
    ping()
    sys.exit(0)


signal.signal(signal.SIGUSR1, succeed)
store = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
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
