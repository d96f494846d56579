"""The store of a round, as an agent serves it: `our_store.py READY_FD`. It becomes that process."""

import json
import os
import socket
import sys

from dlrover_run.workers.store_process import BOOT, PACKAGE

listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
listener.set_inheritable(True)
host, port = listener.getsockname()
os.write(int(sys.argv[1]), json.dumps({"address": host, "port": port}).encode() + b"\n")
os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", BOOT, PACKAGE, str(listener.fileno())])
