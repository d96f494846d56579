"""A client of the store of its round, without torch, that reports itself and waits to be stopped."""

import os
import signal
import socket
import struct

from post import post

from dlrover_run.workers.tcp_store import parser

store = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
store.sendall(struct.pack("<BIBI", parser.VALIDATE, parser.MAGIC, parser.PING, 7))
assert store.recv(4, socket.MSG_WAITALL) == struct.pack("<I", 7)
post(port=os.environ["MASTER_PORT"])
signal.pause()
