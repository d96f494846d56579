"""The store of torch's c10d rendezvous, in a process of its own: `torch_store.py READY_FD`."""

import json
import os
import sys
import threading
from datetime import timedelta

from torch.distributed import TCPStore

READ_TIMEOUT = timedelta(seconds=60)
"""As torchrun's default."""

store = TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True, wait_for_workers=False, timeout=READ_TIMEOUT)
os.write(int(sys.argv[1]), json.dumps({"address": "127.0.0.1", "port": store.port}).encode() + b"\n")
threading.Event().wait()
