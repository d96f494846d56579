"""A pretended script that keeps: what it loads is its own pid, which it tells the test once, and training is what
`pretend.py` does. With the argument `thread` it is not fit to be forked; what comes after that is `pretend.py`'s.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import threading
from pathlib import Path

from tf_ps_runner import hooks

ROWS = os.getpid()


def train() -> None:
    """Be a pretended task, by the environment as it is now."""
    runpy.run_path(str(Path(__file__).with_name("pretend.py")), run_name="__main__")


mine = hooks.task()
told = {"name": f"{mine.role}-{mine.id}", "at": "loaded", "pid": ROWS}
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mailbox:
    mailbox.sendto(json.dumps(told).encode(), "\0" + os.environ["TEST_MAILBOX"])
if sys.argv[1:2] == ["thread"]:
    del sys.argv[1]
    threading.Thread(target=threading.Event().wait, name="loader", daemon=True).start()
hooks.rebuild(train)
